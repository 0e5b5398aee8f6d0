"""The Triton kernels of steps with few rows equal float64, with the operations around a product.

Without a GPU, the kernels are interpreted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.rope.rotation import angles
from ed_layers.activations import activation
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import QKNorm
from ed_layers.attention.blocks.stored_projection import HeadNorm, ProjectedKeys
from ed_layers.cache import PagedCache
from ed_layers.cache.codes import Codes, Format, decode_numbers
from ed_layers.cache.ragged import RaggedBatch
from ed_layers.context import ALL_LAYERS, Ctx
from ed_layers.fixed_order import KernelChoice
from ed_layers.mlp import GatedMLP
from ed_layers.norms import LayerNorm, RMSNorm
from ed_layers.parts import Parts
from ed_layers.projections import few_rows_gpu
from ed_layers.stream_gpu import (
    KnownArray,
    PartialProduct,
    StreamSum,
    StreamSums,
    add_and_normalize,
)
from flax import nnx
from jax.experimental import pallas

INTERPRET = jax.default_backend() != "gpu"


def measure_error(result: Any, expected: np.ndarray) -> float:
    """Return the largest error relative to the largest value."""
    difference = np.abs(np.asarray(result, np.float64) - expected)
    return float(difference.max() / np.abs(expected).max())


def draw_arrays(*shapes: tuple[int, ...], dtype: Any = jnp.float32) -> list[jax.Array]:
    draw = np.random.default_rng(0)
    return [jnp.asarray(draw.normal(size=shape) / shape[0] ** 0.5, dtype) for shape in shapes]


def widen(x: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float64)


@pytest.mark.daily("True-5-384-200-silu", "False-1-100-64-gelu_pytorch_tanh")
@pytest.mark.parametrize("act", sorted(few_rows_gpu.TRITON_ACTS))
@pytest.mark.parametrize(
    ("bias", "rows", "inputs", "outputs"),
    [(True, 5, 384, 200), (False, 1, 100, 64), (False, 150, 64, 48)],
)
def test_gated_product_equals_float64(
    act: str, bias: bool, rows: int, inputs: int, outputs: int
) -> None:
    x, gate, up = draw_arrays((rows, inputs), (inputs, outputs), (inputs, outputs))
    biases = draw_arrays((outputs,), (outputs,)) if bias else []
    multiply = partial(few_rows_gpu.multiply_few_rows, interpret=INTERPRET)
    with jax.default_matmul_precision("highest"):
        result = multiply(x, [gate, up], biases, act=act)
    results = [widen(x) @ widen(w) for w in (gate, up)]
    for i, one in enumerate(biases):
        results[i] += widen(one)
    with jax.enable_x64(True):
        expected = np.asarray(activation(act)(jnp.asarray(results[0]))) * results[1]
    assert measure_error(result, expected) <= 1e-5


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(3, 2048, 72), (200, 640, 48)])
def test_parts_of_a_product_have_its_sum(rows: int, inputs: int, outputs: int) -> None:
    x, w = draw_arrays((rows, inputs), (inputs, outputs))
    with jax.default_matmul_precision("highest"):
        parts = few_rows_gpu.multiply_in_parts(x, w, interpret=INTERPRET)
    assert parts.shape[0] > 1
    assert measure_error(parts.sum(axis=0), widen(x) @ widen(w)) <= 1e-5


@pytest.mark.parametrize(
    ("rows", "d", "splits", "bias", "weight", "offset"),
    [(3, 72, 4, True, True, 0.0), (2, 64, 1, False, True, 1.0), (5, 100, 2, False, False, 0.0)],
)
def test_sum_and_norm_equal_float64(
    rows: int, d: int, splits: int, bias: bool, weight: bool, offset: float
) -> None:
    parts, stream, bias_row, scale = draw_arrays((splits, rows, d), (1, rows, d), (d,), (d,))
    norm = RMSNorm(d, eps=1e-3, weight=weight, offset=offset)
    if weight:
        norm.weight.set_value(scale)
    one = StreamSum(stream, PartialProduct(parts, bias_row if bias else None))
    total, normed = add_and_normalize(one, norm, interpret=INTERPRET)
    expected = widen(parts).sum(axis=0) + widen(stream) + (widen(bias_row) if bias else 0)
    assert measure_error(total, expected) <= 1e-6
    expected /= np.sqrt(np.mean(expected**2, axis=-1, keepdims=True) + 1e-3)
    assert measure_error(normed, expected * (widen(scale) + offset if weight else 1)) <= 1e-5


def test_only_known_sums_use_the_kernel() -> None:
    sums = StreamSums(interpret=INTERPRET)
    x, y = draw_arrays((1, 3, 64), (1, 3, 64))
    norm = RMSNorm(64)
    np.testing.assert_array_equal(sums.normalize(norm, sums.add(x, y)), norm(x + y))
    assert not sums.arrays
    parts = jnp.stack([0.25 * y[0], 0.75 * y[0]])
    sums.arrays[id(y)] = KnownArray(y, product=PartialProduct(parts, None))
    total = sums.rename(sums.add(x, y), jnp.copy(x + y))
    assert measure_error(sums.normalize(norm, total), widen(norm(x + y))) <= 1e-6
    assert sums.get_computed(total) is not total
    layer_norm = LayerNorm(64)
    np.testing.assert_array_equal(
        sums.normalize(layer_norm, total), layer_norm(sums.get_computed(total))
    )


@dataclass(frozen=True)
class Projection:
    """A step that projects queries, keys and values, and writes into the second of two layers.

    Attributes:
        heads, groups, dim, value_dim: h, g, k and v; None = k.
        rotated: rotated dimensions; 0 = no positions.
        interleaved, bias, norm, offset: settings of the projection.
        format: of quantized pages; None = numbers.
        rows: tokens, of which the last two are padding.
        dtype: of the rows and pages.
    """

    heads: int = 4
    groups: int = 2
    dim: int = 64
    value_dim: int | None = None
    rotated: int | None = None
    interleaved: bool = False
    bias: bool = False
    norm: bool = False
    offset: float = 0.0
    format: str | None = None
    rows: int = 5
    dtype: Any = jnp.float32


PROJECTIONS = {
    "groups": Projection(),
    "one key head": Projection(groups=1),
    "as many key heads": Projection(groups=4),
    "128 numbers": Projection(dim=128, bias=True),
    "80 numbers": Projection(dim=80),
    "96 numbers, norm": Projection(dim=96, norm=True),
    "256 numbers, norm, offset": Projection(dim=256, norm=True, offset=1.0, heads=2, groups=1),
    "half is rotated": Projection(dim=64, rotated=32),
    "neighbors": Projection(interleaved=True, bias=True),
    "neighbors of a part": Projection(interleaved=True, dim=72, rotated=48),
    "no positions": Projection(rotated=0, norm=True),
    "narrow values": Projection(dim=192, value_dim=128, heads=2),
    "int8": Projection(format="int8", dim=128),
    "int8, 80 numbers, norm": Projection(format="int8", dim=80, norm=True),
    "fp8": Projection(format="fp8", rotated=32),
    "100 rows": Projection(rows=100),
    "bfloat16": Projection(dtype=jnp.bfloat16, norm=True, bias=True),
}
INPUTS, PAGES, PAGE = 160, 20, 8


@pytest.mark.daily("groups", "96 numbers, norm", "int8, 80 numbers, norm")
@pytest.mark.parametrize("name", PROJECTIONS)
def test_kernel_projects_rotates_and_writes_like_float64(name: str) -> None:
    case = PROJECTIONS[name]
    h, g, k = case.heads, case.groups, case.dim
    v, rows = case.value_dim or k, case.rows
    sizes = (h * k, g * k, g * v)
    x, *weights = draw_arrays((rows, INPUTS), *((INPUTS, size) for size in sizes), dtype=case.dtype)
    biases = draw_arrays(*((size,) for size in sizes), dtype=case.dtype) if case.bias else []
    norms = [HeadNorm(1 + w, 1e-6, case.offset) for w in draw_arrays((k,), (k,))]
    rotated = k if case.rotated is None else case.rotated
    rope = None
    if rotated:
        frequencies = 10000.0 ** -(np.arange(rotated // 2) / (rotated // 2))
        rope = angles(jnp.arange(rows) * 7, frequencies)
    # Interpreted, a row without a slot writes the old number of slot 0.
    slots = np.random.default_rng(3).permutation(PAGES * PAGE - 1)[:rows] + 1
    slots[-2:] = PAGES * PAGE  # padding
    writer = ProjectedKeys(
        x,
        weights,
        biases,
        (norms[0], norms[1]) if case.norm else (None, None),
        rope,
        case.interleaved,
        k,
        v,
        lambda: pytest.fail("the kernel computes the step"),
        interpret=INTERPRET,
    )
    (before,) = draw_arrays((2, PAGES, PAGE, g, 2, max(k, v)), dtype=case.dtype)
    pages: Any = before
    if case.format is not None:
        codes = Format(case.format).encode(jnp.moveaxis(before, 2, 4))
        pages = Codes(jnp.moveaxis(codes.values, 4, 2), codes.scale)
    assert writer.can_write(pages)
    with jax.default_matmul_precision("highest"):
        after = writer.write(pages, (1,), jnp.asarray(slots))
    expected = []
    for i, (weight, count) in enumerate(zip(weights, (h, g, g), strict=True)):
        y = widen(x) @ widen(weight) + (widen(biases[i]) if biases else 0)
        y = y.reshape(rows, count, -1)
        if i < 2 and case.norm:
            y *= (np.mean(y**2, axis=-1, keepdims=True) + 1e-6) ** -0.5
            y *= widen(norms[i].weight) + case.offset
        if i < 2 and rope is not None:
            cos, sin = (widen(table)[:, None] for table in rope)
            columns = np.arange(rotated).reshape(-1, 2) if case.interleaved else None
            columns = np.arange(rotated).reshape(2, -1).T if columns is None else columns
            a, b = y[..., columns[:, 0]], y[..., columns[:, 1]]
            y[..., columns[:, 0]], y[..., columns[:, 1]] = a * cos - b * sin, b * cos + a * sin
        expected.append(y)
    # The kernel computes in float32, and rounds its result to the 8 bits of bfloat16.
    tolerance = 1e-5 if case.dtype == jnp.float32 else 2**-8
    assert measure_error(writer.queries, expected[0]) <= tolerance

    def read(pages: Any) -> np.ndarray:
        if isinstance(pages, Codes):
            slots_last = Codes(jnp.moveaxis(pages.values, 2, 4), pages.scale)
            pages = jnp.moveaxis(decode_numbers(slots_last, jnp.float32), 4, 2)
        return widen(pages).reshape(2, PAGES * PAGE, g, 2, -1)

    old, new = read(pages), read(after)
    stored = slots[:-2]
    rounding = {"int8": 0.51 / 127, "fp8": 1 / 16, None: tolerance}[case.format]
    for i, width in ((1, k), (2, v)):
        written = new[1, stored, :, i - 1]
        assert measure_error(written[..., :width], expected[i][:-2]) <= rounding
        np.testing.assert_array_equal(written[..., width:], 0)
    new[1, stored] = old[1, stored]
    np.testing.assert_array_equal(new, old)


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Choose the kernels of a GPU, and interpret them."""
    call = pallas.pallas_call

    def interpret(*arguments: Any, **options: Any) -> Any:
        return call(*arguments, **{**options, "interpret": INTERPRET})

    monkeypatch.setattr(pallas, "pallas_call", interpret)
    monkeypatch.setattr(few_rows_gpu, "LEAST_NUMBERS", 1)
    with KernelChoice(on_one_gpu=True).restore():
        yield


class Config(EasyDeLBaseConfig):
    """Sizes of small layers."""

    hidden_size: int = 96
    intermediate_size: int = 160
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_dropout: float = 0.0


def build_step(config: EasyDeLBaseConfig, dim: int) -> tuple[jax.Array, Ctx]:
    """Return rows and the context of a step that decodes three sequences."""
    lengths = jnp.asarray([5, 9, 1], jnp.int32)
    ragged = RaggedBatch(
        cu_q_lens=jnp.arange(4, dtype=jnp.int32),
        kv_lens=lengths,
        seq_of_token=jnp.asarray([0, 1, 2, 2], jnp.int32),
        slots={"full": jnp.asarray([4, 16, 24, 999], jnp.int32)},
        page_table={"full": jnp.asarray([[0, 0], [1, 2], [3, 0]], jnp.int32)},
        state_slots=jnp.zeros(3, jnp.int32),
        num_seqs=jnp.asarray(3, jnp.int32),
        decode_only=True,
    )
    positions = ragged.positions()
    rope = angles(positions, 1e4 ** -(np.arange(dim // 2) / (dim // 2)))
    x = jnp.asarray(np.random.default_rng(2).normal(size=(1, 4, 96)), jnp.bfloat16)
    ctx = Ctx(positions, {ALL_LAYERS: rope}, ragged=ragged, mode="decode", config=config)
    return x, ctx


def build_parts(config: EasyDeLBaseConfig) -> Parts:
    return Parts(config, nnx.Rngs(0), jnp.bfloat16, jnp.bfloat16, None)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("format", [None, "int8"])
def test_attention_block_with_the_kernel_equals_the_block_without(
    norm: bool, format: str | None, as_on_gpu: None
) -> None:
    config = Config()
    parts = build_parts(config)
    block = SelfAttention(parts, norm=QKNorm(parts.norm if norm else None))
    x, ctx = build_step(config, 32)
    cache = PagedCache.create(
        [block.cache_spec],
        num_pages=6,
        page_size=8,
        dtype=jnp.bfloat16,
        layout="leaves",
        format=None if format is None else Format(format),
    )
    assert block.build_writer(x, ctx) is not None
    out, after = block(x, ctx, cache, 0)
    with KernelChoice().restore():
        assert block.build_writer(x, ctx) is None
        expected, expected_after = block(x, ctx, cache, 0)
    assert measure_error(out[:, :3], widen(expected[:, :3])) <= 2e-2
    for result, reference in zip(*map(jax.tree.leaves, (after, expected_after)), strict=True):
        # The block without the kernel rounds each operation to bfloat16, the kernel only its
        # result: numbers differ by a few units of 2^-8, and codes by one.
        np.testing.assert_allclose(widen(result), widen(reference), rtol=0.02, atol=1.01)


def test_gated_layer_with_the_kernel_equals_the_layer_without(as_on_gpu: None) -> None:
    config = Config()
    layer = GatedMLP(build_parts(config))
    x, ctx = build_step(config, 32)
    result, gradient = jax.value_and_grad(lambda x: layer(x, ctx).astype("float32").sum())(x)
    with KernelChoice().restore():
        expected, expected_gradient = jax.value_and_grad(
            lambda x: layer(x, ctx).astype("float32").sum()
        )(x)
    assert abs(result - expected) <= 2e-2 * abs(expected) + 0.05
    assert measure_error(gradient, widen(expected_gradient)) <= 2e-2
