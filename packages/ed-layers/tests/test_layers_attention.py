"""Who sees whom, position by position, and numbers at the edge of what floats can hold."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import attention_cases as cases
import attention_pages as pages
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CELLS
from attention_reference import Case, Mask, error
from ed_infra.errors import ConfigError
from ed_infra.masks import MaskInfo
from ed_layers.attention import Mechanism, attend
from ed_layers.attention.kernels import paged
from ed_layers.attention.kernels.online import BlockMask
from ed_layers.attention.scoring import Scoring
from ed_layers.cache import DenseCache, LayerCacheSpec
from hypothesis import given, settings
from hypothesis import strategies as st

BLOCK, LENGTH, WIDTH = 8, 29, 32
# Around the size of a block and of two, and the smallest.
LIMITS = (1, 2, 7, 8, 9, 15, 16, 17)
LEAN = ("vanilla", "blockwise")
SEGMENTS = np.repeat([[1, 2, 0], [1, 1, 1]], [18, 9, 2], axis=1)


def able(*features: str) -> list:
    """Mechanisms that carry these out; all but the two plain ones are nightly."""
    return [
        pytest.param(name, marks=() if name in LEAN else pytest.mark.nightly)
        for name in cases.readers("projected")
        if cases.MECHANISMS[name].features >= set(features)
    ]


def seen(name: str, mask: Mask, *, traced: bool, window: int, chunk: int) -> np.ndarray:
    """Which keys attention sees, [b, s, t]: equal scores, and values that are an identity."""
    b, s = mask.q_segments.shape
    q = np.zeros((b, s, 2, WIDTH), np.float32)
    k = np.random.default_rng(0).normal(size=(b, LENGTH, 1, WIDTH)).astype(np.float32)
    v = np.broadcast_to(np.eye(LENGTH, WIDTH, dtype=np.float32)[:, None], k.shape)
    case = Case(q=q, k=k, v=v, mask=mask, window=window or None, chunk=chunk or None)
    mechanism = cases.mechanism_of(name, blocksize_q=BLOCK, blocksize_k=BLOCK)
    out = cases.run(case, mechanism, traced=traced)["out"][..., :LENGTH]
    weights = out[:, :, 0]
    np.testing.assert_array_equal(out[:, :, 1], weights)
    allowed = weights > 0
    counts = np.maximum(allowed.sum(-1, keepdims=True), 1)
    np.testing.assert_allclose(weights, allowed / counts, atol=1e-6)
    return allowed


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("name", able())
@pytest.mark.daily("vanilla-*")
def test_window_and_chunk_edges_at_every_position(name, causal) -> None:
    """Traced limits: one program for all, in which 0 is no limit."""
    mask = Mask.packed(SEGMENTS, causal)
    for window, chunk in [(0, 0), *((n, 0) for n in LIMITS), *((0, n) for n in LIMITS), (9, 7)]:
        found = seen(name, mask, traced=True, window=window, chunk=chunk)
        np.testing.assert_array_equal(found, mask.allowed(window, chunk), f"{window}, {chunk}")


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.nightly
@pytest.mark.parametrize("limit", ["window", "chunk"])
@pytest.mark.parametrize("name", able())
def test_static_mask_limits_match_reference(name, limit, causal) -> None:
    mask = Mask.packed(SEGMENTS, causal)
    for size in LIMITS:
        only = {"window": 0, "chunk": 0, limit: size}
        found = seen(name, mask, traced=False, **only)
        np.testing.assert_array_equal(found, mask.allowed(**only), str(size))


@pytest.mark.parametrize("name", able())
def test_order_is_the_index_not_the_place(name) -> None:
    """Shuffled tokens, as in a zig-zag over devices, have the same outputs as tokens in order."""
    draw = np.random.default_rng(3)
    mask = Mask.packed(SEGMENTS)
    row = np.arange(2)[:, None]
    q_at, k_at = (draw.permuted(np.tile(np.arange(LENGTH), (2, 1)), axis=1) for _ in range(2))
    shuffled = Mask(
        mask.q_segments[row, q_at],
        mask.kv_segments[row, k_at],
        mask.q_index[row, q_at],
        mask.kv_index[row, k_at],
    )
    expected = mask.allowed(9, 0)[row[:, :, None], q_at[:, :, None], k_at[:, None, :]]
    np.testing.assert_array_equal(seen(name, shuffled, traced=True, window=9, chunk=0), expected)


numbers = st.integers(0, 2**32 - 1)
limits = st.sampled_from([0, 1, 2, 3, 4, 5, 8])
block_sizes = st.sampled_from([(4, 8), (3, 5)])


def random_mask(seed: int, s: int, t: int, *, causal: bool, shuffled: bool) -> Mask:
    """Segments of any length with padding among them; order by place, or by no rule at all."""
    draw = np.random.default_rng(seed)
    ids = np.sort(draw.integers(1, draw.integers(2, 6), (2, t)), axis=1)
    mask = Mask.packed(np.where(draw.random((2, t)) < draw.choice([0, 0.3]), 0, ids), causal)
    at = np.sort(draw.choice(t, s, replace=False))
    index = draw.integers(0, 12, (2, t)) if shuffled else mask.kv_index
    return Mask(mask.kv_segments[:, at], mask.kv_segments, index[:, at], index, causal)


@partial(jax.jit, static_argnums=3)
def spans(info: MaskInfo, window: int, chunk: int, sizes: tuple[int, int]):
    """First and last key block of each query block."""
    mask = BlockMask.of(info, Scoring(1.0, window=window, chunk=chunk), *sizes)
    return mask.spans(causal=info.causal)


@pytest.mark.nightly
@settings(max_examples=100)
@given(numbers, st.booleans(), st.booleans(), limits, limits, block_sizes)
def test_no_block_is_left_out_that_a_query_needs(
    seed, causal, shuffled, window, chunk, sizes
) -> None:
    mask = random_mask(seed, 17, 23, causal=causal, shuffled=shuffled)
    first, last = map(np.asarray, spans(cases.info_of(mask), window, chunk, sizes))
    allowed = mask.allowed(window, chunk)
    for row, query, key in np.argwhere(allowed):
        i, j = query // sizes[0], key // sizes[1]
        assert first[i] <= j < last[i], (row, query, key)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_a_far_block_is_never_visited(causal) -> None:
    """Spans are as short as order allows: that is where the time goes."""
    first, last = spans(MaskInfo.full(1, 64, causal=causal), 9, 0, (8, 8))
    blocks = np.arange(8)
    np.testing.assert_array_equal(first, np.maximum(blocks - 1, 0))
    np.testing.assert_array_equal(last, np.minimum(blocks + (1 if causal else 2), 8))


@pytest.mark.nightly
@settings(max_examples=20)
@given(numbers, st.booleans(), st.integers(0, 25), st.integers(0, 25))
def test_blockwise_attention_matches_vanilla(seed, shuffled, window, chunk) -> None:
    mask = random_mask(seed, 17, 23, causal=True, shuffled=shuffled)
    draw = np.random.default_rng(seed)
    shapes = ((2, 17, 4, 8), (2, 23, 2, 8), (2, 23, 2, 8))
    q, k, v = (draw.normal(size=shape).astype(np.float32) for shape in shapes)
    case = Case(q=q, k=k, v=v, mask=mask, window=window, chunk=chunk)
    d_out, found = cases.noise(case), {}
    for name in LEAN:
        mechanism = cases.mechanism_of(name, blocksize_q=4, blocksize_k=8)
        found[name] = cases.run(case, mechanism, d_out, traced=True)
    for tensor, expected in found["vanilla"].items():
        assert error(found["blockwise"][tensor], expected) <= 1e-5, tensor


def small(name: str, **changes) -> tuple[Case, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A modified causal case, its reference, and the outputs and gradients of a mechanism."""
    case = cases.case_of(CELLS["causal"])
    if name in LEAN:  # one program for most tests: a bias of zeros, sinks that weigh nothing
        bias = np.zeros((1, cases.HEADS, cases.LENGTH, cases.LENGTH), np.float32)
        case = replace(case, bias=bias, sinks=np.full(cases.HEADS, -1e9, np.float32))
    case = replace(case, **changes)
    d_out = cases.noise(case)
    found = cases.run(case, cases.mechanism_of(name), d_out)
    return case, case.run(d_out), found


def assert_equal(
    found: dict[str, np.ndarray], expected: dict[str, np.ndarray], gradient: float = 1e-4
) -> None:
    """Within the bounds of the matrix, unless others are given."""
    errors = {tensor: error(found[tensor], expected[tensor]) for tensor in expected}
    assert errors.pop("out") <= 1e-5
    assert max(errors.values()) <= gradient, errors


def whole(draw: np.random.Generator, *shape: int, most: int) -> np.ndarray:
    """Whole numbers, whose products and sums are exact in float32."""
    return draw.integers(-most, most + 1, shape).astype(np.float32)


@pytest.mark.daily("vanilla")
@pytest.mark.parametrize("name", able())
def test_large_scores_do_not_overflow(name) -> None:
    """Scores of a row differ by thousands: the softmax picks one key or two, nothing overflows.

    Blocks keep of a row its log-sum-exp, whose resolution bounds their gradients here.
    """
    draw = np.random.default_rng(0)
    case = cases.case_of(CELLS["causal"])
    q, k = (whole(draw, *x.shape, most=80) for x in (case.q, case.k))
    case, expected, found = small(name, q=2 * q, k=k)
    largest = np.abs(0.5 * np.einsum("bshk,bthk->bhst", q, np.repeat(k, 2, axis=2))).max()
    assert largest > 1e4
    resolution = np.finfo(np.float32).eps * largest
    assert_equal(found, expected, gradient=1e-4 if name == "vanilla" else resolution)


@pytest.mark.parametrize("name", able("bias"))
@pytest.mark.parametrize("fill", [-np.inf, np.finfo(np.float32).min])
def test_masking_bias_matches_reference(name, fill) -> None:
    """Masks given as a bias: a key for all, and by -inf for one query all that it may see.

    All keys at the least finite number are alike, which no log-sum-exp can hold: it is not a mask.
    """
    case = cases.case_of(CELLS["bias"])
    assert case.bias is not None
    bias = case.bias.copy()
    bias[:, :, 6:, 5] = fill
    bias[:, :, 12] = -np.inf
    case, expected, found = small(name, bias=bias)
    assert not expected["out"][:, 12].any()
    assert_equal(found, expected)


@pytest.mark.daily("vanilla")
@pytest.mark.parametrize("name", able("soft_cap"))
def test_saturated_soft_cap_has_finite_output_and_no_gradient(name) -> None:
    """Scores far beyond the cap: all weights alike, no gradient, no NaN."""
    case = cases.case_of(CELLS["causal"])
    case, expected, found = small(name, q=case.q * 1e3, k=case.k * 1e3, soft_cap=1.5)
    assert_equal(found, expected)
    at_most = np.abs(case.run(cases.noise(case))["v"]).max()
    assert np.abs(found["q"]).max() < 1e-3 * at_most


@pytest.mark.parametrize("name", able("sinks"))
@pytest.mark.parametrize("sink", [-np.inf, -1e9, -15.0, -10.0, 50.0])
def test_sinks_of_any_size_match_reference(name, sink) -> None:
    """Also for the gradient, with a sink so small that 1 minus its share is 1 in float32."""
    sinks = np.full(cases.HEADS, sink, np.float32)
    case, expected, found = small(name, sinks=sinks)
    if sink < -100:  # a sink that weighs nothing is none
        plain = replace(case, sinks=None).run(cases.noise(case))
        np.testing.assert_allclose(expected["out"], plain["out"])
    assert_equal(found, expected)


@pytest.mark.parametrize("name", able())
def test_fully_masked_queries_produce_zeros(name) -> None:
    mask = Mask.packed(np.zeros_like(cases.SEGMENTS))
    _, _, found = small(name, mask=mask)
    assert all(not x.any() for x in found.values())


@pytest.mark.parametrize("name", able())
def test_large_numbers_in_half_precision(name) -> None:
    """bfloat16 has few bits, not a small range: scores of ten thousand pick the right key."""
    draw = np.random.default_rng(0)
    case = cases.case_of(CELLS["causal"])
    q, k, v = (whole(draw, *x.shape, most=80) for x in (case.q, case.k, case.v))
    case = replace(case, q=q, k=k, v=v, scale=0.5)
    mechanism = cases.mechanism_of(name, attn_dtype="bfloat16")
    found = cases.run(case, mechanism)["out"]
    assert error(found, case.run()["out"]) <= 1e-2


@pytest.mark.parametrize("name", able())
def test_float16_attention_matches_reference(name) -> None:
    """A compiled program, which lacks float16 products with float32 sums on a CPU."""
    case = cases.case_of(CELLS["causal"])
    d_out = cases.noise(case)
    found = cases.run(case, cases.mechanism_of(name, attn_dtype="float16"), d_out)
    errors = {tensor: error(found[tensor], x) for tensor, x in case.run(d_out).items()}
    assert max(errors.values()) <= 5e-3, errors


SIZES = {"b": 2, "s": 8, "t": 8, "h": 4, "g": 2, "k": 8, "d": 8}


def call(name: str = "vanilla", *, options: dict | None = None, **sizes: int) -> jax.Array:
    """A call of `attend` with these sizes."""
    b, s, t, h, g, k, d = (sizes.get(letter, n) for letter, n in SIZES.items())
    mask = (
        MaskInfo.full(b, s) if s == t else MaskInfo(*(jnp.ones((b, n), int) for n in (s, t, s, t)))
    )
    arrays = (jnp.ones(shape) for shape in ((b, s, h, k), (b, t, g, k), (b, t, g, d)))
    return attend(*arrays, mask, mechanism=Mechanism(name), **(options or {}))[0]


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ({"h": 3}, {}, "3 query heads and 2 key heads.*a multiple of 2"),
        ({"h": 2, "g": 4}, {}, "2 query heads and 4 key heads"),
        ({"g": 0}, {}, "the number of heads and the head dim must be at least 1"),
        ({"k": 0}, {}, "the head dim must be at least 1"),
        ({}, {"sinks": jnp.zeros(3)}, "one for each of 4 heads"),
        ({}, {"bias": jnp.zeros((1, 3, 8, 8))}, r"\[2 or 1, 4 or 1, 8, 8\]"),
    ],
)
def test_attend_rejects_inconsistent_sizes(sizes, options, message) -> None:
    for name in ("vanilla", "blockwise", "sdpa"):
        with pytest.raises(ConfigError, match=message):
            call(name, options=options, **sizes)


def test_attend_rejects_inconsistent_arrays() -> None:
    x, mask = jnp.ones((2, 8, 2, 8)), MaskInfo.full(2, 8)
    for q, k, v, info, message in (
        (x, x[:1], x[:1], mask, "and q the same batch size"),
        (x, x, x[:, :7], mask, "equal batch size, length and heads"),
        (x, x[..., :4], x, mask, "the same head dim"),
        (x, x, None, mask, "pass both k and v"),
        (x, None, None, mask, "only a layer that reads a cache"),
        (x[0], x, x, mask, r"\[batch, length, heads, head dim\]"),
        (x, x, x, None, "only a ragged batch may omit the mask"),
        (x, x, x, MaskInfo.full(2, 9), r"the mask describes queries \[2, 9\] and keys \[2, 9\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            attend(q, k, v, info, mechanism=Mechanism())
    cache = DenseCache.create([LayerCacheSpec(2, 8)], batch_size=2, capacity=4)
    with pytest.raises(ConfigError, match="leave out steps without tokens"):
        attend(x[:, :0], x[:, :0], x[:, :0], mask, cache=cache, mechanism=Mechanism())


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["vanilla", "blockwise", "sdpa", "auto"])
@pytest.mark.parametrize("empty", ["b", "s", "t"])
def test_no_rows_no_queries_or_no_keys_give_zeros_of_the_shape(name, empty) -> None:
    sizes = {"b": 2, "s": 8, "t": 8, "d": 6, empty: 0}
    out = call(name, **sizes)
    assert out.shape == (sizes["b"], sizes["s"], 4, sizes["d"])
    assert not out.any()


@pytest.mark.daily("blocks")
@pytest.mark.parametrize("step_keys", [2**17, 64], ids=["whole table", "blocks"])
def test_pages_in_the_blocks_of_a_gpu_match_reference(step_keys, monkeypatch) -> None:
    monkeypatch.setattr(paged, "get_platform", lambda config: "gpu")
    monkeypatch.setattr(paged, "GPU_STEP_KEYS", step_keys)
    pages.program.cache_clear()
    case = pages.case_of(CELLS["window+sinks"])
    found = pages.run(case, cases.mechanism_of("ragged_page_attention_v3"))
    pages.program.cache_clear()
    assert error(found, case.run()["out"]) <= 1e-5
