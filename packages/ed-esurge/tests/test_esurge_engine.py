"""The engine equals `model.generate` and the plain forward pass."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from ed_esurge import PoolingParams, SamplingParams, eSurge
from ed_esurge.config import EngineConfig
from ed_esurge.core.plan import PlanRow, StepPlan
from ed_esurge.engine import setup
from ed_esurge.engine.setup import Setup
from ed_infra.errors import ConfigError, EasyDeLError
from ed_infra.logging import forget_said
from ed_layers import native
from ed_models.families.gpt2 import GPT2Config, GPT2LMHeadModel

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def tokens_of(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


@pytest.fixture(scope="module")
def greedy(llama, prompts):
    """Greedy tokens of `model.generate` for each prompt."""
    rows = []
    for prompt in prompts:
        out = llama.generate(np.asarray([prompt]), max_new_tokens=12, eos_token_id=[])
        rows.append(out.sequences[0, len(prompt) :].tolist())
    return rows


def test_greedy_tokens_equal_those_of_generate(surge, prompts, greedy):
    assert tokens_of(surge.generate(prompts, GREEDY)) == greedy


def test_preempted_requests_produce_the_same_tokens(llama, prompts, greedy):
    tiny = eSurge(
        llama,
        max_num_seqs=4,
        page_size=8,
        num_pages=8,
        max_num_seq_buckets=(4,),
        max_num_batched_tokens=16,
        max_model_len=64,
        compile_runner=False,
        use_aot_forward=False,
        silent_mode=True,
    )
    outputs = tiny.generate(prompts, GREEDY)
    assert tokens_of(outputs) == greedy
    assert tiny.stats()["num_preemptions"] > 0
    assert sum(out.metrics.num_preemptions for out in outputs) == tiny.stats()["num_preemptions"]
    assert tiny.stats()["kv_cache_usage"] == 0


@pytest.mark.nightly
def test_overlap_and_scanned_layers_produce_the_same_tokens(
    llama, tokenizer, prompts, greedy, monkeypatch
):
    from ed_esurge.engine import assembly as module

    monkeypatch.setattr(module, "served_model", lambda model: model)  # keep the stacked layout
    engine = eSurge(
        llama,
        tokenizer,
        max_num_seqs=4,
        page_size=8,
        max_num_seq_buckets=(4,),
        max_num_batched_tokens=16,
        max_model_len=128,
        overlap_execution=True,
        silent_mode=True,
    )
    assert tokens_of(engine.generate(prompts, GREEDY)) == greedy
    whole = engine.generate("abc", GREEDY)[0].outputs[0]
    assert whole.text
    stop = next(c for c in whole.text if whole.text.count(c) == 1)
    cut = engine.generate("abc", GREEDY.replace(stop=stop))[0].outputs[0]
    assert (cut.text, cut.stop_reason) == (whole.text.split(stop)[0], stop)
    assert not engine.has_unfinished_requests


def test_prefix_cache_hit_produces_the_same_output(surge):
    rng = np.random.default_rng(3)
    prompt = rng.integers(3, 250, size=37).tolist()
    params = GREEDY.replace(logprobs=0)
    cold, warm = (surge.generate(prompt, params)[0] for _ in range(2))
    assert cold.metrics.num_cached_tokens == 0
    assert warm.metrics.num_cached_tokens == 32
    assert tokens_of([cold]) == tokens_of([warm])
    for a, b in zip(cold.outputs[0].logprobs, warm.outputs[0].logprobs, strict=True):
        token = next(iter(a))
        assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-5)


def test_seeded_sampling_does_not_depend_on_the_batch(surge, prompts):
    mine = SamplingParams(temperature=1.0, seed=7, max_tokens=10, top_p=0.9, ignore_eos=True)
    alone = surge.generate(prompts[2], mine)
    others = [SamplingParams(temperature=1.5, max_tokens=5 + i) for i in range(7)]
    among = surge.generate(
        [*prompts[3:], prompts[2], *prompts[:2]], [*others[:5], mine, *others[5:]]
    )
    assert among[5].outputs[0].token_ids == alone[0].outputs[0].token_ids
    other_seed = surge.generate(prompts[2], mine.replace(seed=8))
    assert tokens_of(other_seed) != tokens_of(alone)
    assert tokens_of(surge.generate(prompts[2], mine)) == tokens_of(alone)


def test_logprobs_equal_those_of_the_forward_pass(surge, plain_logits, prompts):
    params = SamplingParams(
        temperature=1.3, seed=1, max_tokens=8, logprobs=3, prompt_logprobs=2, ignore_eos=True
    )
    for output in surge.generate(prompts, params):
        done = output.outputs[0]
        sequence = output.prompt_token_ids + done.token_ids
        exact = log_softmax(plain_logits(sequence))
        length = len(output.prompt_token_ids)
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == length
        places = [*output.prompt_logprobs[1:], *done.logprobs]
        for position, entries in enumerate(places):
            line, token = exact[position], sequence[position + 1]
            count = 2 if position + 1 < length else 3
            best = np.argsort(-line, kind="stable")[:count].tolist()
            assert next(iter(entries)) == token
            assert set(entries) == {token, *best}
            for candidate, entry in entries.items():
                assert entry.logprob == pytest.approx(line[candidate], abs=1e-5)
                assert entry.rank == 1 + (line > line[candidate]).sum()
        total = sum(next(iter(e.values())).logprob for e in done.logprobs)
        assert done.cumulative_logprob == pytest.approx(total, abs=1e-6)


@pytest.mark.nightly
def test_prompt_is_split_into_parts_without_padding(surge, llama, plain_logits):
    engine = eSurge(
        llama,
        max_num_seqs=4,
        page_size=8,
        max_num_seq_buckets=(4,),
        max_num_batched_tokens=128,
        min_input_pad=8,
        max_model_len=64,
        num_scheduler_steps=1,
        compile_runner=False,
        use_aot_forward=False,
        silent_mode=True,
    )
    runner, totals = engine.loop.runner, []
    run = runner.run
    runner.run = lambda plan: (totals.append(plan.total), run(plan))[1]
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 250, size=count).tolist() for count in (33, 40, 35)]
    params = GREEDY.replace(max_tokens=4, logprobs=0, prompt_logprobs=0)
    outputs = [*engine.generate(prompts[0], params), *engine.generate(prompts[1:], params)]
    # Steps have 8, 32 or 128 tokens. The first prompt is split into 32 and 1. The other two prompts
    # exceed 32 together, and use one step of 128.
    assert totals == [32, 1, 1, 1, 1, 75, 2, 2, 2]
    for output, prompt in zip(outputs, prompts, strict=True):
        done = output.outputs[0]
        whole = llama.generate(np.asarray([prompt]), max_new_tokens=4, eos_token_id=[])
        assert [*prompt, *done.token_ids] == whole.sequences[0].tolist()
        exact = log_softmax(plain_logits(whole.sequences[0].tolist()))
        entries = [*output.prompt_logprobs[1:], *done.logprobs]
        tokens = [*prompt[1:], *done.token_ids]
        for line, token, entry in zip(exact, tokens, entries, strict=False):
            assert entry[token].logprob == pytest.approx(line[token], abs=1e-5)
    totals.clear()
    for pooling in ("mean", "last"):
        params = PoolingParams(pooling=pooling)
        mine, other = (one.embed(prompts[1], params)[0].pooled for one in (engine, surge))
        np.testing.assert_allclose(mine, other, atol=1e-5)
    assert totals == [32, 8, 8]  # the second request has four cached pages
    assert engine.loop.scheduler.limits.shapes == ((8, 4), (32, 4), (128, 4))


def test_warning_about_model_positions_requires_a_set_max_model_len(llama, caplog):
    forget_said()
    positions = llama.config.max_position_embeddings
    assert Setup.resolve(llama, EngineConfig()).limits.max_model_len == positions < 8192
    assert "max_model_len" not in caplog.text
    assert Setup.resolve(llama, EngineConfig(max_model_len=8192)).limits.max_model_len == positions
    expected = f"max_model_len 8192 exceeds the model's {positions} positions: the engine uses "
    assert expected in caplog.text


def test_padding_costs_are_used_on_cpus_only(llama, monkeypatch):
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, silent_mode=True)
    assert Setup.resolve(llama, config).limits.shapes == ((16, 4), (64, 4))
    assert not Setup.resolve(llama, config.replace(batch_invariant=True)).limits.shapes
    monkeypatch.setattr(setup, "get_platform", lambda model: "tpu")
    assert not Setup.resolve(llama, config).limits.shapes


@pytest.mark.nightly
def test_padding_is_free_if_the_native_library_omits_it(llama, surge, monkeypatch):
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, silent_mode=True)
    monkeypatch.setattr(native.products, "in_use", lambda: True)
    assert not Setup.resolve(llama, config).limits.shapes
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 64, "n_positions": 64}
    one = {"sharding_axis_dims": (1, 1, 1, 1, 1), "bos_token_id": None, "eos_token_id": None}
    biased = GPT2LMHeadModel.create(GPT2Config(**sizes, **one), seed=0)
    assert Setup.resolve(biased, config).limits.shapes
    # The states of padding are zeros in a model whose padding is free.
    functions, memory = surge.loop.runner.functions, surge.loop.runner.memory
    shape = surge.loop.runner.buckets.prefill[0]
    step = functions._uncompiled._make_step(shape)
    prompt = np.zeros(16, np.int32)
    plan = StepPlan(0, (PlanRow("a", 0, 0, prompt[:5].tolist(), {}),))
    buffer, _ = surge.loop.runner._builder.build(plan, shape)
    hidden = step(surge.loop.runner.weights.leaves, memory.cache, memory.state.last, buffer)[2]
    assert np.abs(hidden[:5]).max() > 0
    assert shape.tokens > 5 and not np.asarray(hidden[5:]).any()


def test_prompt_logprobs_equal_the_loss_of_the_trainer(surge, llama, prompts):
    from ed_layers.losses import token_logprobs

    tokens = prompts[3]
    hidden = llama(np.asarray([tokens]), logits_at="none").last_hidden_state[0]
    exact, _ = token_logprobs(hidden[:-1], llama.lm_head_weight(), np.asarray(tokens[1:]))
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    found = surge.generate(tokens, params)[0].prompt_logprobs[1:]
    found = [entry[token].logprob for entry, token in zip(found, tokens[1:], strict=True)]
    np.testing.assert_allclose(found, exact, atol=1e-5)


def test_nothing_is_compiled_after_ready(surge, llama, tokenizer, prompts):
    surge = eSurge(llama, tokenizer, surge.config.replace(compile_runner=True))
    before = surge.stats()["num_compiled"]
    compiled = []
    listener = lambda event, *_, **__: compiled.append(event)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        mixed = [
            GREEDY,
            SamplingParams(temperature=1, max_tokens=5),
            SamplingParams(temperature=0.7, top_k=5, top_p=0.9, logprobs=4, max_tokens=7),
            SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=3),
            SamplingParams(presence_penalty=1, repetition_penalty=1.2, max_tokens=9),
            SamplingParams(logit_bias={5: 3.0}, min_tokens=3, max_tokens=9),
            SamplingParams(allowed_token_ids=(9, 10, 11), max_tokens=4),
            SamplingParams(n=3, max_tokens=4, min_p=0.1),
        ]
        surge.generate(prompts, mixed)
        surge.generate(prompts[:1], mixed[:1])
        during = [event for event in compiled if "compile" in event]
        jax.jit(lambda x: x * 3 + len(compiled))(1.0)
        assert any("compile" in event for event in compiled)  # the monitor reports compilations
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert during == []
    assert surge.stats()["num_compiled"] == before


def adjusted_greedy(plain_logits, prompt, params, count):
    """Return greedy tokens of the plain forward pass, with penalties and masks in numpy."""
    output: list[int] = []
    for _ in range(count):
        logits = plain_logits(prompt + output)[-1].copy()
        for token in set(prompt + output):
            scale = params.repetition_penalty
            logits[token] = logits[token] / scale if logits[token] > 0 else logits[token] * scale
        for token in set(output):
            logits[token] -= params.frequency_penalty * output.count(token)
            logits[token] -= params.presence_penalty
        for token, bias in params.logit_bias.items():
            logits[token] += bias
        if params.allowed_token_ids is not None:
            mask = np.full_like(logits, -np.inf)
            mask[list(params.allowed_token_ids)] = 0
            logits += mask
        output.append(int(logits.argmax()))
    return output


@pytest.mark.parametrize(
    "options",
    [
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.4},
        {"logit_bias": {7: 4.0, 9: -100.0}},
        {"allowed_token_ids": tuple(range(40, 60)), "frequency_penalty": 2.0},
    ],
)
def test_adjusted_logits_match_reference_sampling(surge, plain_logits, prompts, options):
    params = GREEDY.replace(max_tokens=6, **options)
    # Two adjusted requests and a plain one in the same batch do not affect each other.
    outputs = surge.generate([prompts[4], prompts[0], prompts[4]], [params, GREEDY, params])
    expected = adjusted_greedy(plain_logits, prompts[4], params, 6)
    assert tokens_of(outputs)[0] == tokens_of(outputs)[2] == expected
    plain = adjusted_greedy(plain_logits, prompts[4], GREEDY, 6)
    assert plain != expected


def test_reused_request_id_keeps_no_state(surge, prompts):
    for token in (30, 31, 32):
        params = GREEDY.replace(logit_bias={token: 1000.0})
        surge.add_request("again", prompts[4], params)
        assert surge.step()[0].outputs[0].token_ids == [token]
        surge.abort_request("again")
        surge.step()


def test_bad_words_are_not_generated(surge, tokenizer):
    prompt = tokenizer("the")["input_ids"]
    plain = surge.generate(prompt, GREEDY)[0].outputs[0].token_ids
    # The third and fourth token form a word: the fourth is banned only after the third.
    word = tokenizer.decode(plain[2:4])
    ids = tokenizer(word, add_special_tokens=False)["input_ids"]
    params = GREEDY.replace(bad_words=(word,))
    found = surge.generate(prompt, params)[0].outputs[0].token_ids
    assert ids not in [found[i : i + len(ids)] for i in range(len(found))]
    if ids == plain[2:4]:
        assert found[:3] == plain[:3]
        assert found[3] != plain[3]
    single = surge.generate(prompt, GREEDY.replace(bad_words=("a", "e")))[0].outputs[0]
    banned = {tokenizer(c, add_special_tokens=False)["input_ids"][0] for c in "ae"}
    assert not banned.intersection(single.token_ids)


def test_stop_tokens_and_length_limits_finish_requests(surge, prompts, greedy):
    prompt, tokens = prompts[1], greedy[1]
    stop = next(t for t in tokens[3:] if tokens.index(t) == tokens.index(t) and t not in tokens[:3])
    at = tokens.index(stop)
    params = GREEDY.replace(stop_token_ids=(stop,))
    out = surge.generate(prompt, params)[0].outputs[0]
    assert (out.token_ids, out.finish_reason, out.stop_reason) == (tokens[: at + 1], "stop", stop)
    out = surge.generate(prompt, GREEDY)[0].outputs[0]
    assert (len(out.token_ids), out.finish_reason) == (12, "length")
    # Before min_tokens, a stop token is never sampled.
    late = surge.generate(prompt, params.replace(min_tokens=at + 2))[0].outputs[0]
    assert late.token_ids[:at] == tokens[:at]
    assert stop not in late.token_ids[: at + 2]
    # A bias forces the end-of-sequence token; with ignore_eos the sequence continues.
    biased = SamplingParams(temperature=0, max_tokens=4, logit_bias={2: 1000.0})
    out = surge.generate(prompt, biased)[0].outputs[0]
    assert (out.token_ids, out.finish_reason, out.stop_reason) == ([2], "stop", None)
    out = surge.generate(prompt, biased.replace(ignore_eos=True))[0].outputs[0]
    assert (out.token_ids, out.finish_reason) == ([2] * 4, "length")


def test_stop_strings_truncate_output_text(surge):
    params = GREEDY.replace(max_tokens=40, skip_special_tokens=False)
    whole = surge.generate("hello", params)[0].outputs[0]
    stop = whole.text[5:8]
    at = whole.text.index(stop)
    out = surge.generate("hello", params.replace(stop=stop))[0].outputs[0]
    assert (out.text, out.finish_reason, out.stop_reason) == (whole.text[:at], "stop", stop)
    assert len(out.token_ids) < 40
    out = surge.generate("hello", params.replace(stop=stop, include_stop_str_in_output=True))[0]
    assert out.outputs[0].text == whole.text[: at + len(stop)]
    out = surge.generate("hello", params.replace(stop=stop, min_tokens=40))[0].outputs[0]
    assert (out.text, out.finish_reason) == (whole.text, "length")
    out = surge.generate("hello", GREEDY.replace(detokenize=False))[0].outputs[0]
    assert out.text == ""


def test_streamed_output_equals_unstreamed_output(surge):
    params = GREEDY.replace(max_tokens=30, logprobs=1)
    whole = surge.generate("stream me", params)[0].outputs[0]
    deltas = list(surge.stream("stream me", params))
    assert all(delta.delta for delta in deltas)
    assert len(deltas) > 2
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert "".join(d.outputs[0].text for d in deltas) == whole.text
    assert [t for d in deltas for t in d.outputs[0].token_ids] == whole.token_ids
    joined = deltas[0]
    for delta in deltas[1:]:
        joined.add(delta)
    assert len(joined.outputs[0].logprobs) == 30
    # The second run reads its prompt from the prefix cache, so values differ by rounding.
    total = whole.cumulative_logprob
    assert joined.outputs[0].cumulative_logprob == pytest.approx(total, abs=1e-4)


def test_completions_of_a_request_share_the_prompt(surge, prompts):
    params = SamplingParams(n=3, temperature=1.5, seed=3, max_tokens=6, ignore_eos=True)
    output = surge.generate(prompts[6], params)[0]
    assert [out.index for out in output.outputs] == [0, 1, 2]
    assert len({tuple(out.token_ids) for out in output.outputs}) == 3
    one = surge.generate(prompts[6], params.replace(n=1))[0]
    assert one.outputs[0].token_ids == output.outputs[0].token_ids


def test_aborted_requests_and_closed_streams_release_resources(surge, prompts):
    surge.add_request("a", prompts[0], GREEDY.replace(max_tokens=100))
    surge.add_request("b", prompts[1], GREEDY)
    with pytest.raises(ConfigError, match="in use"):
        surge.add_request("a", prompts[0], GREEDY)
    first = surge.step()
    assert {output.request_id for output in first} == {"a", "b"}
    assert surge.abort_request("a")
    assert not surge.abort_request("a")
    seen: dict[str, list] = {"a": [], "b": []}
    while surge.has_unfinished_requests:
        for output in surge.step():
            seen[output.request_id].append(output)
    assert [(o.finished, o.outputs[0].finish_reason) for o in seen["a"]] == [(True, "abort")]
    assert seen["b"][-1].outputs[0].finish_reason == "length"
    stream = surge.stream(prompts[0], GREEDY)
    next(stream)
    stream.close()
    assert not surge.has_unfinished_requests
    assert surge.stats()["kv_cache_usage"] == 0


@pytest.mark.nightly
def test_requests_continue_after_a_weight_update_and_a_pause(
    surge, llama, make_llama, prompts, greedy
):
    other = make_llama(seed=2)
    expected = other.generate(np.asarray([prompts[3]]), max_new_tokens=12, eos_token_id=[])
    traces = surge.stats()["num_compiled"]
    try:
        surge.update_model_weights(other)
        output = surge.generate(prompts[3], GREEDY)[0]
        assert output.outputs[0].token_ids == expected.sequences[0, 40:].tolist()
        assert output.metrics.num_cached_tokens == 0
    finally:
        surge.update_model_weights(llama)
    surge.add_request("x", prompts[3], GREEDY)
    outputs = surge.step() + surge.step() + surge.step() + surge.step()
    surge.pause()
    assert surge.step() == []
    with pytest.raises(EasyDeLError, match="resume"):
        surge.generate(prompts[0], GREEDY)
    surge.resume()
    while surge.has_unfinished_requests:
        outputs += surge.step()
    assert [t for o in outputs for t in o.outputs[0].token_ids] == greedy[3]
    assert surge.stats()["num_compiled"] == traces
    with pytest.raises(ConfigError, match="structure"):
        surge.update_model_weights(make_llama(attention_bias=True))


def test_end_token_outside_the_vocabulary_raises_error(llama):
    with pytest.raises(ConfigError, match="999, outside the vocabulary of 260"):
        eSurge(llama, extra_eos_token_ids=(999,), compile_runner=False)
