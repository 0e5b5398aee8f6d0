"""A packed document changes neither the loss nor the gradient of other documents of its row."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra import registry
from ed_infra.enums import TaskType
from ed_infra.inputs import Inputs
from ed_trainers import Models, arguments_class, trainer_class
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

VOCAB, LENGTH = 40, 24
SIZES: dict[str, dict[str, Any]] = {
    "bert": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": LENGTH,
        "num_labels": 3,
    },
    "t5": {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
        "decoder_start_token_id": 0,
    },
}
#: Method -> family and task.
METHODS = {
    "token_classification": ("bert", TaskType.TOKEN_CLASSIFICATION),
    "sft": ("t5", TaskType.SEQUENCE_TO_SEQUENCE),
    "dpo": ("t5", TaskType.SEQUENCE_TO_SEQUENCE),
}
#: Largest difference; the sums of a row contain the same numbers in another program only.
TOLERANCE = 1e-6


def side(random: np.random.Generator, lengths: list[int]) -> dict[str, np.ndarray]:
    """Return the arrays of documents in one row."""
    ids, segments = np.zeros((1, LENGTH), np.int32), np.zeros((1, LENGTH), np.int32)
    at = 0
    for number, length in enumerate(lengths, 1):
        ids[0, at : at + length] = random.integers(3, VOCAB, length)
        segments[0, at : at + length] = number
        at += length
    return {"input_ids": ids, "segment_ids": segments}


def batch_of(method: str, random: np.random.Generator, lengths: list[int]) -> dict[str, Any]:
    first = side(random, lengths)
    if method == "token_classification":
        labels = np.where(first["segment_ids"] > 0, first["input_ids"] % 3, -100)
        return {**first, "labels": labels}
    if method == "sft":
        target = side(random, lengths[::-1])
        labels = np.where(target["segment_ids"] > 0, target["input_ids"], -100)
        return {**first, "labels": labels, "decoder_segment_ids": target["segment_ids"]}
    answers = {name: side(random, lengths) for name in ("chosen", "rejected")}
    return first | {f"{n}_{key}": x for n, of in answers.items() for key, x in of.items()}


@pytest.fixture(scope="module", params=METHODS)
def run(request: pytest.FixtureRequest) -> Any:
    """Return the method, a trainer, and the loss and gradient of one document of a batch."""
    method = request.param
    family, task = METHODS[method]
    config = registry.get_config(family)(
        vocab_size=VOCAB, pad_token_id=0, sharding_axis_dims=(1, 1, 1, 1, 1), **SIZES[family]
    )
    model = registry.get_module(task, family).create(config, seed=0)
    options = {"reference_free": True} if method == "dpo" else {}
    arguments = arguments_class(method)(total_batch_size=1, **options)
    trainer = trainer_class(method)(arguments, model)
    graphdef, params, other = trainer.weights().model.split_module()

    @jax.jit
    def gradient(params: Any, prepared: Any, document: Any) -> Any:
        def objective(params: Any) -> Any:
            segments = prepared.get("decoder_segment_ids", prepared["segment_ids"])
            weights = prepared["weights"] * (segments == document)
            # Pairs are [b, 2, s], which the axes of `Inputs` do not describe.
            batch: Any = {**prepared, "weights": weights}
            batch = batch if method == "dpo" else Inputs(batch)
            models = Models(nnx.merge(graphdef, params, other))
            return trainer.loss(models, batch, None).sums["main_loss"].sum

        return jax.value_and_grad(objective)(params)

    def of_document(batch: Any, document: int) -> tuple[float, list[np.ndarray]]:
        prepared = {name: jnp.asarray(x) for name, x in trainer.prepare(batch).items()}
        loss, grads = gradient(params, prepared, document)
        return float(loss), [np.asarray(leaf) for leaf in jax.tree.leaves(grads)]

    return method, of_document


@pytest.mark.nightly
@settings(max_examples=8, deadline=None)
@given(
    lengths=st.lists(st.integers(3, 8), min_size=2, max_size=3),
    changed=st.integers(0, 2),
    seed=st.integers(0, 2**20),
)
def test_changed_document_changes_no_other_document(
    run: Any, lengths: list[int], changed: int, seed: int
) -> None:
    method, of_document = run
    changed = 1 + changed % len(lengths)
    batch = batch_of(method, np.random.default_rng(seed), lengths)
    other = batch_of(method, np.random.default_rng(seed + 1), lengths)
    mixed = {}
    for name, array in batch.items():
        prefix = next((p for p in ("chosen_", "rejected_") if name.startswith(p)), "")
        of = f"{prefix}segment_ids"
        if method == "sft" and name in ("labels", "decoder_segment_ids"):
            of = "decoder_segment_ids"
        mixed[name] = np.where(batch[of] == changed, other[name], array)
    assert any((mixed[name] != batch[name]).any() for name in batch)
    for document in range(1, len(lengths) + 1):
        before, after = of_document(batch, document), of_document(mixed, document)
        if document == changed:
            assert before[0] != after[0]
            continue
        assert abs(before[0] - after[0]) <= TOLERANCE
        for own, found in zip(before[1], after[1], strict=True):
            np.testing.assert_allclose(found, own, atol=TOLERANCE, rtol=0)
