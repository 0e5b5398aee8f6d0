"""Llama on every five-axis mesh of eight devices has the values of one device and stays sharded.

Six meshes run by default, all 35 nightly.
"""

from __future__ import annotations

import math
import re
from functools import cache

import jax
import numpy as np
import pytest
from ed_models.body import context as model_inputs

from tests.multidevice import llama_case as case
from tests.multidevice import llama_specs

# All tests in one group, so that one worker compiles the reference once.
pytestmark = pytest.mark.xdist_group("llama_meshes")

MESHES = [
    pytest.param(dims, marks=() if dims in case.USUAL else pytest.mark.nightly, id=str(dims))
    for dims in case.ALL
]
TOLERANCE = 1e-5


@cache
def placed(dims: case.Dims) -> case.Placed:
    return case.place(dims)


def assert_close(name: str, got: jax.Array, want: jax.Array) -> None:
    got, want = np.asarray(got), np.asarray(want)
    worst = np.abs(got - want).max() / np.abs(want).max()
    assert worst <= TOLERANCE, f"{name}: {worst:.2g} of its largest value"


@pytest.mark.daily("(2, 2, 1, 2, 1)")
@pytest.mark.parametrize("dims", MESHES)
def test_forward_and_gradients_match_one_device(dims: case.Dims) -> None:
    got, want = placed(dims), case.on_one_device()
    assert_close("loss", got.loss, want.loss)
    assert_close("logits", got.logits, want.logits)
    assert got.gradients.keys() == want.gradients.keys()
    for name, gradient in want.gradients.items():
        assert_close(name, got.gradients[name], gradient)


def ways(size: int, *counts: int) -> int:
    """Return the number of parts of a dimension: the axis size, or 1 if it does not divide."""
    return math.prod(counts) if size % math.prod(counts) == 0 else 1


@pytest.mark.nightly
@pytest.mark.parametrize("dims", MESHES)
def test_splittable_arrays_are_never_replicated(dims: case.Dims) -> None:
    """Matrices are split over fsdp and tp; the shardings are listed independent of the rules."""
    dp, fsdp, _, tp, sp = dims
    one = placed(dims)
    for name, array in {**one.params, **one.gradients}.items():
        split = array.size // array.addressable_shards[0].data.size
        if array.ndim - ("*" in name) == 1:
            assert "norm" in name and split == 1
        else:
            vocabulary = "embed_tokens" in name or "lm_head" in name
            assert split == fsdp * (ways(252, tp) if vocabulary else tp), name
        assert one.gradients[name].sharding == one.params[name].sharding
    tokens = dp * fsdp * sp
    for name, array in [("hidden", one.hidden), ("logits", one.logits)]:
        split = array.size // array.addressable_shards[0].data.size
        assert split == tokens * (ways(252, tp) if name == "logits" else 1), name
    # The compiled program never gathers the largest activation, b × s × mlp.
    widths = "|".join(str(case.MLP // n) for n in (1, 2, 4, 8))
    largest = re.findall(rf"f32\[((?:\d+,)*(?:{widths}))\]", one.program)
    activations = [shape for shape in largest if elements(shape) % (3 * case.B) == 0]
    assert activations, "no activation of the feed-forward is found in the program"
    assert min(case.B * case.S * case.MLP * 2 // elements(s) for s in activations) >= tokens * tp


def elements(shape: str) -> int:
    return math.prod(int(n) for n in shape.split(","))


def test_partition_specs_match_golden_table() -> None:
    assert llama_specs.table() == llama_specs.FILE.read_text(encoding="utf-8"), (
        "if the change is intended, run: uv run python -m tests.multidevice.llama_specs"
    )


@pytest.mark.nightly
def test_recorded_specs_match_array_sharding() -> None:
    for dims in case.USUAL:
        recorded = llama_specs.recorded(dims)
        for name, array in placed(dims).params.items():
            assert llama_specs.shown(array.sharding.spec) == recorded[name], (dims, name)


@pytest.mark.parametrize("dims", [dims for dims in case.USUAL if dims[4] > 1], ids=str)
@pytest.mark.parametrize("given", ["segment_ids", "attention_mask", "nothing"])
def test_positions_are_correct_on_split_sequence(dims: case.Dims, given: str) -> None:
    """XLA's partitioner once computed a wrong cumulative sum along an axis split over sp."""
    config = case.config(dims).seal()
    segments = case.batch()["segment_ids"]
    real = segments != 0 if given == "attention_mask" else np.ones_like(segments)
    want = np.maximum(np.cumsum(real, axis=1) - 1, 0)
    if given == "segment_ids":
        starts = np.diff(segments, axis=1, prepend=0) > 0
        want -= np.maximum.accumulate(np.where(starts, want, 0), axis=1)
    sharding = case.rows_sharding(config)

    @jax.jit
    def positions(segments: jax.Array) -> jax.Array:
        mask = {} if given == "nothing" else {given: segments}
        ctx, _ = model_inputs.layer_context(config, segments.shape, **mask)
        # Split along the sequence, as in the layers.
        return jax.lax.with_sharding_constraint(ctx.position_ids, sharding)

    np.testing.assert_array_equal(positions(jax.device_put(segments, sharding)), want)
