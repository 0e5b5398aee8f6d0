"""Adapters and quantized weights of encoders and encoder-decoders, of text and of speech.

Adapters are exchanged with PEFT. Quantized models compute the numbers of their decoded weights.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra import registry
from ed_infra.enums import TaskType
from ed_infra.specs import LoraSpec
from ed_models.adapters.peft import load_adapter, save_adapter
from ed_models.conformance import ONE, OURS, Subject, forward
from flax import nnx

from tests.conformance.cases import subjects
from tests.parity.peft_cases import trained

TASKS = (
    *(TaskType.MASKED_LM, TaskType.SEQUENCE_CLASSIFICATION, TaskType.SEQUENCE_TO_SEQUENCE),
    *(TaskType.SPEECH_SEQUENCE_TO_SEQUENCE, TaskType.CTC),
)
#: Task -> `task_type` of PEFT. PEFT's class of encoder-decoders passes `input_ids`, which models of
#: speech do not read, so their adapters name no task.
TASK_TYPES = {TaskType.SEQUENCE_TO_SEQUENCE: "SEQ_2_SEQ_LM"}
#: All linear layers but heads; PEFT trains no embeddings.
LAYERS = LoraSpec(
    rank=2, alpha=3.0, targets=r"^(?!(lm_head|score|transform|pooler)\b)(?!.*(embed|rel_norm))"
)


#: transformers stores this family under other names than those of its modules, which PEFT reads.
RENAMED = ("nomic_bert",)


#: One model of each kind of encoder-decoder and of speech.
QUANTIZED = (
    *("bart: large", "longt5: transient-global", "t5gemma: another decoder, separate head"),
    *("whisper: large", "moonshine: tiny", "wav2vec2: base"),
)


def rows(*, peft: bool) -> list[Any]:
    """Return each configuration of a task; one of BERT runs by default."""
    params = []
    for row in subjects():
        if row.task in TASKS and not (peft and row.model_type in RENAMED):
            marks = [pytest.mark.xdist_group(f"peft {row.model_type}")]
            fast = str(row) == "bert: encoder (masked-language-model)"
            marks += [] if fast else [pytest.mark.nightly]
            params.append(pytest.param(row, marks=marks, id=str(row)))
    return params


def small(subject: Subject) -> Subject:
    """Return the subject with the initial weights of transformers, which have the usual size."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(subject.model_type, **subject.fields)
    subject = copy.copy(subject)
    made = subject.torch_class.from_config(config).float().eval()
    subject.__dict__["torch_model"] = made  # replaces the cached model with larger weights
    return subject


def ours(model: Any, subject: Subject) -> np.ndarray:
    return np.asarray(subject.output(forward(model, **subject.build_padded_inputs())))[subject.real]


def near(got: np.ndarray, expected: np.ndarray) -> None:
    """Compare up to 1e-5 of the largest number; T5's logits have no scale."""
    bound = 1e-5 * max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(got, expected, atol=bound, rtol=0)


@pytest.mark.daily("bert: encoder (masked-language-model)")
@pytest.mark.torch
@pytest.mark.parametrize("subject", rows(peft=True))
def test_adapters_are_interchangeable_with_peft(subject: Subject, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    import torch

    subject = small(subject)
    model = trained(subject.model, LAYERS)
    assert np.abs(ours(model, subject) - ours(subject.model, subject)).max() > 1e-5
    save_adapter(model, tmp_path / "ours")
    settings = json.loads((tmp_path / "ours/adapter_config.json").read_text())
    assert settings["task_type"] == TASK_TYPES.get(subject.task)
    base = copy.deepcopy(subject.torch_model)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    expected = subject.torch_outputs(theirs)[subject.real]
    near(ours(model, subject), expected)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in theirs.named_parameters():
            if "lora_" in name:
                value.normal_(0, 0.1)
    theirs.save_pretrained(tmp_path / "theirs")
    model = load_adapter(subject.model, tmp_path / "theirs")
    expected = subject.torch_outputs(theirs)[subject.real]
    near(ours(model, subject), expected)


@pytest.mark.nightly
@pytest.mark.parametrize("subject", rows(peft=False))
def test_quantized_model_computes_the_numbers_of_its_decoded_weights(subject: Subject) -> None:
    fields = registry.get_config(subject.model_type).from_dict(
        subject.fields, sharding_axis_dims=ONE
    )
    plain = subject.module_class.create(fields, seed=0)
    model = plain.quantize([("", {"dtype": "nf4"})])
    assert model.is_quantized
    expected = ours(model.dequantize(), subject)
    bound = OURS * max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(ours(model, subject), expected, atol=bound, rtol=0)
    assert np.abs(expected - ours(plain, subject)).max() > 1e-4


@pytest.mark.nightly
@pytest.mark.parametrize("subject", [row for row in rows(peft=False) if row.id in QUANTIZED])
def test_adapters_over_quantized_weights_change_only_themselves(subject: Subject) -> None:
    fields = registry.get_config(subject.model_type).from_dict(
        subject.fields, sharding_axis_dims=ONE
    )
    base = subject.module_class.create(fields, seed=0).quantize([("", {"dtype": "nf4"})])
    model = trained(base, LAYERS)
    expected = ours(trained(base.dequantize(), LAYERS), subject)
    bound = OURS * max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(ours(model, subject), expected, atol=bound, rtol=0)
    graphdef, params, other = model.split_module()

    def loss(params: Any) -> jax.Array:
        output = subject.output(nnx.merge(graphdef, params, other)(**subject.build_full_inputs()))
        return jnp.mean(jnp.square(output))

    grads = jax.jit(jax.grad(loss))(params)
    leaves = nnx.to_flat_state(grads)
    assert {path[-1] for path, _ in leaves} == {"lora_a", "lora_b"}
    assert all(bool(jnp.any(x.get_value() != 0)) for _, x in leaves)
