"""Proposed tokens do not change the output, and reduce the number of steps."""

from __future__ import annotations

import pytest
from ed_esurge import EngineConfig, SamplingParams, StructuredOutputs, eSurge
from ed_esurge.config import SpeculativeConfig
from ed_esurge.core.ngrams import NgramIndex, PromptLookup
from ed_esurge.thinking import ThinkingBudget
from ed_infra.errors import ConfigError
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, logprobs=1)
RANDOM = SamplingParams(seed=3, temperature=1.2, top_p=0.9, max_tokens=14, ignore_eos=True)


def same(outputs, others) -> None:
    """Check that tokens are equal, and log-probabilities up to the rounding of other batches."""
    for output, other in zip(outputs, others, strict=True):
        for one, two in zip(output.outputs, other.outputs, strict=True):
            assert (one.token_ids, one.text) == (two.token_ids, two.text)
            assert (one.finish_reason, one.stop_reason) == (two.finish_reason, two.stop_reason)
            if one.logprobs is not None:
                assert len(one.logprobs) == len(one.token_ids)
                assert one.cumulative_logprob == pytest.approx(two.cumulative_logprob, abs=1e-4)


@pytest.fixture
def speculating(surge, oracle, monkeypatch):
    """A function that runs requests with and without the oracle, and returns the proposer and both
    numbers of steps."""

    def run(prompts, params, most: int = 3, propose=None):
        plain = surge.generate(prompts, params)
        surge.loop.scheduler.pages.forget_prefixes()
        before = surge.stats()["num_steps"]
        surge.generate(prompts, params)
        between = surge.stats()["num_steps"]
        surge.loop.scheduler.pages.forget_prefixes()
        proposer = oracle(most, plain)
        if propose is not None:
            proposer.propose = propose
        monkeypatch.setattr(surge.loop.scheduler, "proposer", proposer)
        compiled = surge.stats()["num_compiled"]
        same(surge.generate(prompts, params), plain)
        after = surge.stats()
        assert after["num_compiled"] == compiled
        assert after["kv_cache_usage"] == 0
        return proposer, between - before, after["num_steps"] - between

    return run


@pytest.mark.parametrize("params", [GREEDY, RANDOM, RANDOM.replace(n=2, top_p=1.0)])
def test_proposals_do_not_change_the_output(speculating, prompts, params):
    proposer, plain, fewer = speculating(prompts[:3], params)
    assert 0 < proposer.num_accepted_tokens < proposer.num_draft_tokens
    assert sum(proposer.accepted_per_pos) == proposer.num_accepted_tokens
    assert proposer.accepted_per_pos == sorted(proposer.accepted_per_pos, reverse=True)
    assert fewer < plain


def test_accepted_proposals_reduce_the_number_of_steps(speculating, prompts):
    _, plain, fewer = speculating(prompts[3], GREEDY)
    assert (plain, fewer) == (16, 7)  # three chunks of the prompt, then 13 tokens in 4 steps


def test_requests_finish_inside_accepted_draft_tokens(speculating, surge, prompts):
    whole = surge.generate(prompts[1], GREEDY)[0].outputs[0].token_ids
    for params in (
        GREEDY.replace(stop_token_ids=(whole[6],)),
        GREEDY.replace(max_tokens=6),
        GREEDY.replace(logprobs=None, max_tokens=1),
    ):
        speculating(prompts[1], params)


def test_tokens_after_the_end_are_not_counted_as_accepted(speculating, surge, prompts):
    """The first step with proposals has the tokens 1 to 3, and token 2 ends the request."""
    whole = surge.generate(prompts[1], GREEDY)[0].outputs[0].token_ids
    assert whole[2] not in whole[:2]

    def propose_whole(request, most):
        done = len(request.output)
        return whole[done : done + most]

    params = GREEDY.replace(stop_token_ids=(whole[2],))
    proposer, _, _ = speculating(prompts[1], params, propose=propose_whole)
    assert (proposer.num_draft_tokens, proposer.num_accepted_tokens) == (3, 2)
    assert proposer.accepted_per_pos == [1, 1, 0]


ADJUSTED = {
    "penalties": {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {7: 3.0, 11: -4.0}},
    "mask": {"allowed_token_ids": tuple(range(20, 60)), "presence_penalty": 1.0},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": (30, 31, 32), "ignore_eos": False},
    "repetition": {"dry_multiplier": 2.0, "dry_allowed_length": 1},
    "filter": {"top_n_sigma": 1.5},
    "filter and penalty": {"top_n_sigma": 1.5, "frequency_penalty": 0.7},
    "mirostat": {"mirostat": 2},
    "processed": {"logprobs": 2, "logprobs_mode": "processed_logprobs", "frequency_penalty": 0.7},
}


@pytest.mark.parametrize("name", ADJUSTED)
def test_requests_with_adjusted_logits_have_proposals(speculating, prompts, name):
    params = SamplingParams(seed=5, temperature=1.1, max_tokens=14, ignore_eos=True)
    proposer, *_ = speculating(prompts[:3], params.replace(**ADJUSTED[name]))
    # Mirostat, and filters with penalties, depend on the token before in the middle of the step.
    assert (proposer.num_accepted_tokens > 0) == (name not in ("mirostat", "filter and penalty"))
    greedy = {key: value for key, value in ADJUSTED[name].items() if not key.startswith("mirostat")}
    speculating(prompts[:3], GREEDY.replace(**greedy))


def test_bad_words_and_thinking_budgets_end_a_draft(speculating, surge, tokenizer, prompts):
    """Proposals after which other tokens are forbidden or forced are dropped."""
    letters = tuple(tokenizer("abcdefghijklmnop", add_special_tokens=False)["input_ids"])
    params = GREEDY.replace(allowed_token_ids=letters)
    text = surge.generate(prompts[1], params)[0].outputs[0].text
    words = {"bad_words": (text[2:4], text[5:7])}
    budget = ThinkingBudget(tokens=5, end_token_ids=letters[:3])
    for more in (words, {"thinking_budget": budget}, {**words, "frequency_penalty": 0.9}):
        proposer, *_ = speculating(prompts[1], params.replace(**more))
        assert proposer.num_accepted_tokens > 0


@pytest.mark.proves("speculative_config")
def test_prompt_lookup_works_with_a_grammar(llama, tokenizer, surge):
    """The grammar forces repeated text, which is proposed; masks reject wrong proposals."""
    wanted = StructuredOutputs(regex="(abc){4}(abd){3}")
    params = SamplingParams(temperature=1, seed=1, max_tokens=40, structured_outputs=wanted)
    plain = surge.generate("x", params)
    assert plain[0].outputs[0].text == "abc" * 4 + "abd" * 3
    scheduler, before = surge.loop.scheduler, surge.stats()["num_steps"]
    scheduler.proposer = PromptLookup(SpeculativeConfig(num_speculative_tokens=3))
    try:
        same(surge.generate("x", params), plain)
        stats = surge.stats()
    finally:
        scheduler.proposer = None
    assert stats["num_steps"] - before <= 14
    assert stats["spec_decode_num_accepted_tokens"] >= 9
    assert stats["spec_decode_num_accepted_tokens_per_pos_0"] > 0
    after = StructuredOutputs(regex="(abc){4}", after=("c",))
    thinking = SamplingParams(temperature=0, max_tokens=12, structured_outputs=after)
    plain = surge.generate("x", thinking)
    scheduler.proposer = PromptLookup(SpeculativeConfig(prompt_lookup_min=1))
    try:
        same(surge.generate("x", thinking), plain)
    finally:
        scheduler.proposer = None


@pytest.mark.nightly
def test_preempted_and_cached_sequences_have_proposals(llama, oracle, prompts):
    engine = eSurge(
        llama,
        max_num_seqs=4,
        page_size=8,
        num_pages=8,
        max_num_batched_tokens=16,
        max_num_seq_buckets=(4,),
        max_model_len=64,
        speculative_config={"num_speculative_tokens": 2},
        compile_runner=False,
        use_aot_forward=False,
        silent_mode=True,
    )
    scheduler = engine.loop.scheduler
    assert isinstance(scheduler.proposer, PromptLookup)
    scheduler.proposer = None
    plain = engine.generate(prompts, GREEDY)
    assert engine.stats()["num_preemptions"] > 0
    scheduler.proposer = proposer = oracle(2, plain)
    same(engine.generate(prompts, GREEDY), plain)
    hits = engine.stats()["prefix_cache_hits"]
    # Later requests with the same tokens find the pages that proposals filled.
    longer = prompts[1] + plain[1].outputs[0].token_ids[:12]
    engine.generate(prompts[1], GREEDY)
    engine.generate(longer, GREEDY.replace(max_tokens=1))
    assert engine.stats()["prefix_cache_hits"] == hits + 16
    assert proposer.num_accepted_tokens > 0
    assert engine.stats()["kv_cache_usage"] == 0


def test_an_engine_of_one_sequence_verifies_proposals(llama, tokenizer, oracle, surge, prompts):
    """Proposals need rows beside the row of the only sequence."""
    engine = eSurge(
        llama,
        tokenizer,
        max_num_seqs=1,
        page_size=8,
        max_model_len=64,
        compile_runner=False,
        silent_mode=True,
        speculative_config={"num_speculative_tokens": 3},
    )
    plain = surge.generate(prompts[1], GREEDY)
    engine.loop.scheduler.proposer = proposer = oracle(3, plain)
    same(engine.generate(prompts[1], GREEDY), plain)
    assert proposer.num_accepted_tokens > 0
    assert engine.stats()["num_steps"] < 14


@pytest.fixture(scope="module")
def drafted(llama, tokenizer):
    """An engine whose draft model is the model itself. Proposals are wrong only where the draft
    model lacks information."""
    return eSurge(
        llama,
        tokenizer,
        draft_model=llama,
        speculative_config={"method": "draft_model", "num_speculative_tokens": 3},
        max_num_seqs=4,
        page_size=8,
        num_pages=12,
        max_num_batched_tokens=16,
        max_num_seq_buckets=(4,),
        max_model_len=64,
        compile_runner=False,
        silent_mode=True,
    )


@pytest.mark.nightly
@pytest.mark.parametrize("params", [GREEDY, RANDOM.replace(n=2)])
def test_draft_model_produces_same_tokens_in_fewer_steps(drafted, surge, prompts, params):
    same(drafted.generate(prompts, params), surge.generate(prompts, params))
    proposer, steps = drafted.loop.scheduler.proposer, drafted.stats()["num_steps"]
    same(drafted.generate(prompts[3], params), surge.generate(prompts[3], params))
    assert drafted.stats()["num_steps"] - steps < 12
    drafted.generate(prompts, params.replace(max_tokens=1))
    assert proposer.num_accepted_tokens > 0.8 * proposer.num_draft_tokens
    assert not (proposer._computed or proposer._pages or proposer._drafts or proposer._starts)
    assert drafted.stats()["kv_cache_usage"] == 0


@pytest.mark.nightly
def test_draft_model_works_with_a_grammar_and_after_a_pause(drafted, surge):
    wanted = StructuredOutputs(regex="[ab]{4}c+d")
    params = RANDOM.replace(structured_outputs=wanted, ignore_eos=False)
    drafted.pause()
    drafted.resume()
    same(drafted.generate("x", params), surge.generate("x", params))


@pytest.mark.nightly
def test_unsupported_draft_models_raise_error(llama, make_llama, tmp_path):
    def engine(**options):
        return eSurge(llama, max_model_len=64, max_num_seqs=2, silent_mode=True, **options)

    asked = {"method": "draft_model"}
    with pytest.raises(ConfigError, match="requires a model: set `model` to its directory"):
        engine(speculative_config=asked)
    with pytest.raises(ConfigError, match="a draft_model has no effect without its method"):
        engine(draft_model=llama)
    with pytest.raises(ConfigError, match="vocabulary of 300 tokens and the model one of 260"):
        engine(draft_model=make_llama(vocab_size=300), speculative_config=asked)
    with pytest.raises(ConfigError, match="32 positions and max_model_len is 64"):
        engine(draft_model=make_llama(max_position_embeddings=32), speculative_config=asked)


@pytest.mark.nightly
def test_draft_model_loads_from_a_directory(llama, tokenizer, surge, prompts, tmp_path):
    llama.save_pretrained(tmp_path)
    wanted = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 2}
    options = {"max_model_len": 64, "max_num_seqs": 4, "page_size": 8, "silent_mode": True}
    engine = eSurge(
        llama, tokenizer, speculative_config=wanted, max_num_batched_tokens=16, **options
    )
    same(engine.generate(prompts, GREEDY), surge.generate(prompts, GREEDY))
    compiled = engine.loop.scheduler.proposer.runner.num_traces
    engine.generate(prompts[2], GREEDY)
    assert engine.loop.scheduler.proposer.runner.num_traces == compiled
    assert engine.loop.scheduler.proposer.num_accepted_tokens > 0


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(0, 40), st.integers(1, 5))
def test_lookup_finds_the_last_equal_ngram(tokens, cut, most):
    index = NgramIndex(3, 2)
    index.extend(tokens[:cut])
    index.propose(most)
    index.extend(tokens[cut:])
    expected: list[int] = []
    for length in (3, 2):
        places = [
            p for p in range(length, len(tokens)) if tokens[p - length : p] == tokens[-length:]
        ]
        if len(tokens) >= length and places:
            for at in range(places[-1], places[-1] + most):
                follows = [*tokens, *expected]
                expected.append(follows[at])
            break
    assert index.propose(most) == expected


def test_invalid_speculative_options_raise_error():
    with pytest.raises(ValidationError, match="prompt_lookup_min 5 is above prompt_lookup_max 4"):
        EngineConfig(speculative_config={"prompt_lookup_min": 5})
