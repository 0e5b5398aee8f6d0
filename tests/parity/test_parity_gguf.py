"""GGUF files of every architecture: read again, compared with llama.cpp and with transformers.

Tests with llama.cpp are skipped without an interpreter that has it
(`ed_elarge.certify.llama_cpp_logits`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ed_elarge.certify.llama_cpp_logits import interpreter, llama_cpp_logits
from ed_infra.enums import TaskType
from ed_infra.errors import CheckpointError
from ed_infra.testing import require_torch
from ed_models.base import gguf_export
from ed_models.checkpoints import hub
from ed_models.checkpoints.gguf.table import ARCHITECTURES
from ed_models.checkpoints.loading import weight_map
from ed_models.checkpoints.saving import layer_values
from ed_models.conformance import ONE, Subject, forward
from flax import nnx

from tests.gguf_cases import FURTHER, NAME, gguf_subjects, has_rounded_limits
from tests.parity.gguf_comparisons import (
    WITHOUT_LOGITS,
    as_llama_cpp,
    compare,
    perplexities,
    perplexity,
    wide_subject,
)
from tools.gguf_table import NEW_TOKENS

#: Differences relative to the largest logit. llama.cpp tabulates GELU for float16 inputs.
CLOSE, LLAMA_CPP = 2e-5, 1e-3
#: Model types whose files `transformers` reads with the numbers of the model.
IN_TRANSFORMERS = ("llama", "qwen2")
#: Parameters that a file stores in another form, so a value is rounded once.
CHANGED = ("norm.weight", "A_log")


def rows(*model_types: str, task: TaskType | None = None) -> list[Any]:
    params = []
    for subject in gguf_subjects(*model_types):
        if task is None or subject.task == task:
            mark = pytest.mark.xdist_group(f"gguf {subject.model_type}")
            params.append(pytest.param(subject, marks=mark, id=str(subject)))
    return params


def written(subject: Subject, folder: Path, dtype: str = "f32") -> Path:
    """Write a model; skip a test of a model that llama.cpp would compute otherwise."""
    refused = None
    try:
        return subject.model.save_gguf(folder / "model.gguf", dtype=dtype)
    except CheckpointError as error:
        refused = str(error)
    assert "llama.cpp" in refused
    assert subject.row != NAME, refused
    return pytest.skip(refused[:200])


def parameters(model: Any) -> dict[str, np.ndarray]:
    state = nnx.state(model)
    read = layer_values(state)
    names = weight_map(type(model), state, model.config).shapes
    return {name: np.asarray(read(name, ()), np.float32) for name in names}


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.parametrize("subject", rows())
def test_written_model_is_read_with_equal_parameters_and_logits(
    subject: Subject, tmp_path: Path
) -> None:
    path = written(subject, tmp_path)
    read = hub.from_pretrained(path, task=subject.task, sharding_axis_dims=ONE)
    own, found = parameters(subject.model), parameters(read)
    for name, value in own.items():
        bound = 2e-7 * np.abs(value).max() + 2e-7 if name.endswith(CHANGED) else 0
        np.testing.assert_allclose(found[name], value, rtol=0, atol=bound, err_msg=name)
    expected = subject.logits
    logits = np.asarray(subject.output(forward(read, **subject.build_full_inputs())))
    assert np.abs(logits - expected).max() <= CLOSE * np.abs(expected).max()


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.skipif(interpreter() is None, reason="no interpreter with llama.cpp")
@pytest.mark.parametrize("subject", rows(task=TaskType.CAUSAL_LM))
def test_logits_equal_those_of_llama_cpp(subject: Subject, tmp_path: Path) -> None:
    if subject.model_type in WITHOUT_LOGITS:
        pytest.skip("not run by the interface of language models")
    if not has_rounded_limits(subject):
        pytest.skip("YaRN of gpt-oss does not round its limits, and that of llama.cpp does")
    path = written(subject, tmp_path)
    found, _ = llama_cpp_logits(path, subject.ids)
    expected = subject.logits
    assert np.abs(found - expected).max() <= LLAMA_CPP * np.abs(expected).max()


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.skipif(interpreter() is None, reason="no interpreter with llama.cpp")
@pytest.mark.parametrize("subject", rows("llama", "qwen2", "mixtral", "olmo2"))
def test_64_greedy_tokens_equal_those_of_llama_cpp(subject: Subject, tmp_path: Path) -> None:
    path = written(subject, tmp_path)
    _, expected = llama_cpp_logits(path, subject.ids, 64)
    read = hub.from_pretrained(path, task=subject.task, sharding_axis_dims=ONE)
    count = subject.ids.shape[1]
    made = read.generate(subject.ids, max_new_tokens=64, do_sample=False, eos_token_id=None)
    np.testing.assert_array_equal(np.asarray(made.sequences)[:, count:], expected)


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.skipif(interpreter() is None, reason="no interpreter with llama.cpp")
@pytest.mark.parametrize(
    "model_type", sorted({row.model_type for row in ARCHITECTURES} - WITHOUT_LOGITS)
)
def test_quantized_file_of_every_architecture_has_llama_cpps_logits_and_tokens(
    model_type: str, tmp_path: Path
) -> None:
    subject = wide_subject(model_type)
    wide = written(subject, tmp_path)
    with as_llama_cpp():  # llama.cpp tabulates GELU in float16
        error, tokens = compare(subject, wide, "Q4_K")
    assert error <= LLAMA_CPP
    assert tokens == NEW_TOKENS


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.parametrize("model_type", sorted({row.model_type for row in ARCHITECTURES}))
def test_kept_codes_of_every_architecture_have_the_decoded_values(
    model_type: str, tmp_path: Path
) -> None:
    subject = wide_subject(model_type)
    path = written(subject, tmp_path, "q4_0")
    options = {"task": subject.task, "sharding_axis_dims": ONE}
    plain = hub.from_pretrained(path, **options)
    rules = {"dtype": "gguf"}
    kept = hub.from_pretrained(path, quantization_config=rules, apply_quantization=True, **options)
    decoded = parameters(kept.dequantize())
    for name, value in parameters(plain).items():
        np.testing.assert_array_equal(decoded[name], value, err_msg=name)
    expected = np.asarray(subject.output(forward(plain, **subject.build_full_inputs())))
    found = np.asarray(subject.output(forward(kept, **subject.build_full_inputs())))
    # Attention with random weights amplifies the rounding of queries and keys.
    assert np.abs(found - expected).max() <= LLAMA_CPP * np.abs(expected).max()


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.skipif(interpreter() is None, reason="no interpreter with llama.cpp")
def test_mistral_model_in_a_mistral3_file_has_llama_cpps_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = next(
        row for row in ARCHITECTURES if (row.name, row.model_type) == ("mistral3", "mistral")
    )
    monkeypatch.setattr(gguf_export, "row_of_model", lambda _: row)
    subject = wide_subject("mistral")
    path = written(subject, tmp_path)
    error, tokens = compare(subject, path, "F32")
    assert error <= CLOSE
    assert tokens == NEW_TOKENS


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.skipif(interpreter() is None, reason="no interpreter with llama.cpp")
def test_perplexities_equal_those_of_llama_cpp_to_four_digits(tmp_path: Path) -> None:
    subject = wide_subject("llama")
    wide = written(subject, tmp_path)
    for name in ("F32", "Q8_0", "Q4_K"):
        own, decoded, _ = perplexities(wide, name, subject.ids)
        assert f"{own:.4g}" == f"{decoded:.4g}"


def test_perplexity_of_equal_logits_is_the_number_of_tokens() -> None:
    logits, ids = np.zeros((2, 5, 7), np.float32), np.arange(10).reshape(2, 5) % 7
    assert perplexity(logits, ids) == pytest.approx(7)


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.parametrize("subject", rows(*IN_TRANSFORMERS))
def test_transformers_reads_the_file_with_equal_logits(subject: Subject, tmp_path: Path) -> None:
    import transformers

    torch = require_torch()
    if subject.model_type == "llama" and subject.fields.get("attention_bias"):
        pytest.skip("transformers reads no biases of Llama")
    path = written(subject, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        logits = model(torch.tensor(subject.ids.astype(np.int64))).logits.numpy()
    assert np.abs(logits - subject.logits).max() <= 1e-4 * np.abs(logits).max()


def test_further_configurations_belong_to_the_table() -> None:
    assert {subject.model_type for subject in gguf_subjects(*FURTHER)} == FURTHER.keys()
