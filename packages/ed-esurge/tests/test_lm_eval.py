"""lm-evaluation-harness on the engine produces the scores of the plain forward pass."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_esurge.sampling import SamplingParams
from ed_esurge.testing import byte_tokenizer
from ed_infra.errors import ConfigError
from ed_infra.testing import tiny_llama

lm_eval = pytest.importorskip("lm_eval")

CONTEXT = 128


@pytest.fixture(scope="module")
def model():
    from ed_models import AutoEasyDeLModelForCausalLM
    from ed_models.families.llama import LlamaConfig

    fields = tiny_llama(vocab_size=258, num_hidden_layers=2, initializer_range=0.3)
    fields.pop("model_type")
    fields |= {"bos_token_id": 256, "eos_token_id": 257}  # the tokenizer's
    # One device: the tests of the runner cover meshes.
    config = LlamaConfig(**fields, sharding_axis_dims=(1, 1, 1, 1, 1))
    return AutoEasyDeLModelForCausalLM.from_config(
        config, dtype=jnp.float32, param_dtype=jnp.float32, seed=0
    )


@pytest.fixture(scope="module")
def engine(model):
    from ed_esurge.engine import eSurge

    return eSurge(
        model,
        byte_tokenizer(),
        max_model_len=CONTEXT,
        max_num_seqs=4,
        max_num_seq_buckets=(4,),  # few shapes to compile
        max_num_batched_tokens=32,  # prompts are prefilled in chunks
        min_input_pad=32,
        page_size=16,
        compile_runner=False,
        silent_mode=True,
    )


@pytest.fixture(scope="module")
def adapter(engine):
    from ed_esurge.lm_eval import eSurgeLM

    return eSurgeLM(engine, max_gen_toks=8)


@functools.cache
def plain_forward(model):
    """A jitted forward pass of one padded row: ids [s] -> log-probabilities [s, v]."""
    graphdef, *state = model.split_module()

    @jax.jit
    def forward(state, ids):
        logits = type(model).merge_module(graphdef, *state)(ids[None]).logits[0]
        return jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)

    return functools.partial(forward, state)


def plain(model, tokens):
    """Return log-probabilities [s-1, v] of the plain forward pass: row i predicts token i + 1.

    The padding is on the right, where a causal model ignores it.
    """
    rows = plain_forward(model)(jnp.asarray(tokens + [0] * (CONTEXT - len(tokens))))
    return np.asarray(rows)[: len(tokens) - 1]


def score(model, context, continuation):
    """Return the log-probability of a continuation, and whether it is the greedy one."""
    rows = plain(model, [*context, *continuation])[-len(continuation) :]
    picked = rows[np.arange(len(continuation)), continuation]
    return float(picked.sum()), bool((rows.argmax(-1) == continuation).all())


class Request:
    """A request with the interface that the harness passes to an adapter."""

    def __init__(self, *args):
        self.args = args


def test_loglikelihoods_equal_those_of_the_forward_pass(model, adapter):
    pairs = [
        ("The cat", " sat on the mat"),
        ("", "no context"),
        ("Grüße", " 世界"),
        ("a", "b"),
        ("space before ", "the end"),
    ]
    results = adapter.loglikelihood([Request(*pair) for pair in pairs], disable_tqdm=True)
    for (context, continuation), (total, greedy) in zip(pairs, results, strict=True):
        if context:
            left, right = adapter._encode_pair(context, continuation)
        else:
            left = [adapter.prefix_token_id]
            right = adapter.tok_encode(continuation, add_special_tokens=False)
        expected, best = score(model, left, right)
        assert total == pytest.approx(expected, abs=1e-5 * len(right))
        assert greedy == best


@pytest.mark.nightly
def test_greedy_continuation_is_recognized(model, adapter, engine):
    prompt = adapter.tok_encode("The")
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    tokens = engine.generate([prompt], params)[0].outputs[0].token_ids
    (total, greedy), (_, other) = adapter._loglikelihood_tokens(
        [(None, prompt, tokens), (None, prompt, [*tokens[:-1], (tokens[-1] + 1) % 256])]
    )
    assert greedy
    assert not other
    assert total == pytest.approx(score(model, prompt, tokens)[0], abs=4e-5)


@pytest.mark.nightly
def test_long_context_is_truncated_on_the_left(model, adapter):
    context, continuation = list(range(65, 91)) * 8, [70, 71, 72]
    ((total, _),) = adapter._loglikelihood_tokens([(None, context, continuation)])
    kept = context[-(CONTEXT - 1 - 3) :]
    assert total == pytest.approx(score(model, kept, continuation)[0], abs=3e-5)
    with pytest.raises(ConfigError, match="max_model_len"):
        adapter._loglikelihood_tokens([(None, [65], [66] * CONTEXT)])


@pytest.mark.nightly
def test_rolling_loglikelihood_scores_every_token_once(model, adapter):
    text = "It was a bright cold day in April, and the clocks were striking thirteen. " * 5
    (total,) = adapter.loglikelihood_rolling([Request(text)], disable_tqdm=True)
    tokens = adapter.tok_encode(text)
    window = adapter.max_length
    expected, start = 0.0, 0
    while start < len(tokens):
        end = min(start + window, len(tokens))
        # Each window predicts `window` tokens. The last window includes earlier tokens as context.
        before = [adapter.prefix_token_id, *tokens[:end]][-(window + 1) :][: -(end - start)]
        expected += score(model, before, tokens[start:end])[0]
        start = end
    assert total == pytest.approx(expected, abs=1e-5 * len(tokens))


@pytest.mark.nightly
def test_generate_until_cuts_at_the_stop_string(adapter, engine):
    requests = [
        Request("The cat", {"until": [], "max_gen_toks": 12}),
        Request("A dog", {"until": ["\n"], "do_sample": False}),
    ]
    whole, default = adapter.generate_until(requests, disable_tqdm=True)
    prompt = adapter.tok_encode("The cat")
    params = SamplingParams(temperature=0, max_tokens=12, skip_special_tokens=False)
    assert whole == engine.generate([prompt], params)[0].outputs[0].text
    assert default is not None
    middle = whole[len(whole) // 2]
    (cut,) = adapter.generate_until(
        [Request("The cat", {"until": [middle], "max_gen_toks": 12})], disable_tqdm=True
    )
    assert cut == whole.split(middle)[0]
    with pytest.raises(ConfigError, match="did you mean 'top_p'"):
        adapter.generate_until([Request("a", {"until": [], "top_pp": 1})])
    with pytest.raises(ConfigError, match="beam"):
        adapter.generate_until([Request("a", {"until": [], "num_beams": 2})])


TASKS = {
    "cloze": """
task: cloze
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: 0
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}]
""",
    "perplexity": """
task: perplexity
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte}]
""",
    "write": """
task: write
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 6}
metric_list: [{metric: exact_match}]
""",
}


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.nightly
def test_harness_runs_local_tasks(model, adapter, tmp_path, chat, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [
        {"question": "The sky is", "choices": [" blue", " made of cheese"]},
        {"question": "Two and two are", "choices": [" four", " seven"]},
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(task.replace("DATA", str(data)))
    from lm_eval.tasks import TaskManager

    names = ["cloze", "write"] if chat else list(TASKS)
    results = lm_eval.simple_evaluate(
        model=adapter,
        tasks=names,
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
        apply_chat_template=chat,
        log_samples=True,
    )["results"]
    if chat:
        assert "acc,none" in results["cloze"]
        return
    best = 0
    for row in rows:
        scores = [
            score(model, *adapter._encode_pair(row["question"], choice))[0]
            for choice in row["choices"]
        ]
        best += scores[0] > scores[1]
    assert results["cloze"]["acc,none"] == best / len(rows)
    nats = 0.0
    for row in rows:
        tokens = adapter.tok_encode(row["question"])
        nats -= score(model, [adapter.prefix_token_id], tokens)[0]
    count = sum(len(row["question"].encode()) for row in rows)
    bits = nats / count / np.log(2)
    assert results["perplexity"]["bits_per_byte,none"] == pytest.approx(bits, abs=1e-5)


@pytest.mark.nightly
def test_scores_equal_those_of_the_hf_model_of_the_harness(model, adapter, tmp_path, monkeypatch):
    """Metrics and log-probabilities equal those of the harness's `hf` model on torch."""
    pytest.importorskip("torch")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    model.save_pretrained(tmp_path / "model")
    adapter.tokenizer.save_pretrained(tmp_path / "model")
    text = "The sky over these green hills was blue and the two of them had four small cats"
    words = text.split()
    rng = np.random.default_rng(0)
    rows = [
        {
            "question": " ".join(rng.choice(words, 6)),
            "choices": [" " + " ".join(rng.choice(words, n)) for n in (1, 2, 3)],
        }
        for _ in range(12)
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(task.replace("DATA", str(data)))
    torch = HFLM(
        pretrained=str(tmp_path / "model"),
        device="cpu",
        dtype="float32",
        batch_size=1,
        max_length=CONTEXT,
    )
    ours, theirs = (
        lm_eval.simple_evaluate(
            model=one,
            tasks=list(TASKS),
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
            bootstrap_iters=0,
            log_samples=True,
        )
        for one in (adapter, torch)
    )
    for name in TASKS:
        metrics, expected = ours["results"][name], theirs["results"][name]
        for metric in expected:
            if isinstance(expected[metric], float):
                assert metrics[metric] == pytest.approx(expected[metric], rel=1e-6), metric
        for sample, other in zip(ours["samples"][name], theirs["samples"][name], strict=True):
            for mine, other_one in zip(sample["resps"], other["resps"], strict=True):
                if name == "write":
                    assert mine == other_one
                    continue
                said, wanted = mine[0], other_one[0]
                value, right = (x[0] if isinstance(x, tuple | list) else x for x in (said, wanted))
                assert float(value) == pytest.approx(float(right), abs=1e-4)


def test_lm_eval_adapter_does_not_import_torch():
    import subprocess
    import sys

    code = "import sys, ed_esurge.lm_eval; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
