"""A call with `labels` returns the loss of `compute_loss`, and the same logits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra import registry
from ed_infra.enums import TaskType
from ed_infra.testing import require_torch
from ed_layers.losses import TokenLoss

IDS = jnp.asarray([[5, 6, 7, 8, 0, 0], [9, 3, 4, 5, 6, 7]], jnp.int32)
MASK = (IDS != 0).astype(jnp.int32)
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_labels": 3,
    "pad_token_id": 0,
    "sharding_axis_dims": (1, 1, 1, 1, 1),
}
ENCODER_DECODER: dict[str, Any] = {
    "vocab_size": 32,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 1,
    "num_heads": 2,
    "num_labels": 3,
    "decoder_start_token_id": 0,
    "sharding_axis_dims": (1, 1, 1, 1, 1),
}
TOKENS = jnp.where(MASK == 0, -100, IDS)
CLASSES = jnp.asarray([2, 0])
IMAGES = jnp.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
VIT: dict[str, Any] = {
    **{name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")},
    "num_attention_heads": 2,
    "sharding_axis_dims": (1, 1, 1, 1, 1),
    "image_size": 8,
    "patch_size": 4,
}
#: Task, family, configuration, inputs, labels.
CASES: list[tuple[TaskType, str, dict[str, Any], dict[str, Any], jax.Array]] = [
    (TaskType.CAUSAL_LM, "llama", SIZES, {"input_ids": IDS, "attention_mask": MASK}, TOKENS),
    (TaskType.SEQUENCE_TO_SEQUENCE, "t5", ENCODER_DECODER, {"input_ids": IDS}, TOKENS),
    (TaskType.MASKED_LM, "bert", SIZES, {"input_ids": IDS, "attention_mask": MASK}, TOKENS),
    (TaskType.TOKEN_CLASSIFICATION, "bert", SIZES, {"input_ids": IDS}, TOKENS % 3),
    (TaskType.SEQUENCE_CLASSIFICATION, "bert", SIZES, {"input_ids": IDS}, CLASSES),
    (TaskType.SEQUENCE_CLASSIFICATION, "llama", SIZES, {"input_ids": IDS}, CLASSES),
    (TaskType.MULTIPLE_CHOICE, "bert", SIZES, {"input_ids": IDS.reshape(2, 2, 3)}, CLASSES % 2),
    (TaskType.IMAGE_CLASSIFICATION, "vit", VIT, {"pixel_values": IMAGES}, CLASSES % 2),
]


def build(task: TaskType, family: str, fields: dict[str, Any]) -> Any:
    config = registry.get_config(family)(**fields)
    return registry.get_module(task, family).create(config, seed=1)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("task", "family", "fields", "inputs", "labels"),
    [pytest.param(*case, id=f"{case[1]}-{case[0].value}") for case in CASES],
)
def test_call_with_labels_returns_the_loss_of_compute_loss(
    task: TaskType, family: str, fields: dict[str, Any], inputs: dict[str, Any], labels: jax.Array
) -> None:
    model = build(task, family, fields)
    output = model(**inputs, labels=labels)
    expected, _ = model.compute_loss(**inputs, labels=labels)
    np.testing.assert_allclose(output.loss, expected.loss, rtol=1e-5)
    if task != TaskType.SEQUENCE_TO_SEQUENCE:  # its decoder reads the labels
        assert np.array_equal(output.logits, model(**inputs).logits)
    assert np.isfinite(output.loss)


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_of_labels_equals_torch(smoothing: float) -> None:
    torch = require_torch()
    model = build(*CASES[0][:3])
    logits = torch.tensor(np.asarray(model(IDS, attention_mask=MASK).logits))
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1),
        torch.tensor(np.asarray(TOKENS))[:, 1:].flatten().long(),
        label_smoothing=smoothing,
    )
    found, _ = model.compute_loss(
        IDS, TOKENS, attention_mask=MASK, loss_config=TokenLoss(label_smoothing=smoothing)
    )
    np.testing.assert_allclose(found.loss, expected, rtol=1e-5)
