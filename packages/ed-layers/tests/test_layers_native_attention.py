"""Attention of the native library against float64: every reading, any shape, mask and storage; and
calls that it does not know, which go to plain XLA."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.masks import MaskInfo
from ed_layers.attention.kernel import Cached, Paged, Projected
from ed_layers.attention.kernels import kernels_here, native
from ed_layers.attention.kernels.blockwise import blockwise_attention
from ed_layers.attention.kernels.vanilla import vanilla_attention
from ed_layers.attention.scoring import Alibi, RelativeBias, Scoring, get_head_indices
from ed_layers.cache.codes import Codes, Format, decode_numbers
from ed_layers.cache.protocol import Pages, StoredLayer
from ed_layers.cache.ragged import RaggedBatch
from ed_layers.native import library
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.skipif(
    library.level() is None, reason="not built: python -m ed_layers.native build"
)
SIZES = st.integers(1, 90)
HEADS = st.sampled_from([(1, 1), (3, 1), (4, 2), (9, 3)])
LIMITS = st.sampled_from([None, 1, 7, 70])
CAPS = st.sampled_from([None, 5.0])
#: Biases by distance; "rounded" is ALiBi with products in bfloat16.
BIASES = st.sets(st.sampled_from(["relative", "alibi", "rounded"]))


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' process has several devices."""
    monkeypatch.setenv(library.VARIABLE, "1")


def drawn(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), dtype)


def segments(rng: np.random.Generator, b: int, n: int) -> np.ndarray:
    """Segments one after another, padding in between and behind."""
    ids = np.sort(rng.integers(1, 4, (b, n)), axis=1)
    return np.where(rng.random((b, n)) < 0.1, 0, ids).astype(np.int32)


def exact(q, k, v, info: MaskInfo, scoring: Scoring) -> np.ndarray:
    """Attention in float64: q [b, s, h, k], k and v [b, t, g, ..]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    heads = get_head_indices(k.shape[2], q.shape[2] // k.shape[2])
    k, v = (np.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("bshk,bthk->bhst", q, k) * scoring.scale
    if scoring.soft_cap is not None:
        scores = scoring.soft_cap * np.tanh(scores / scoring.soft_cap)
    if scoring.by_distance:
        bias = np.asarray(scoring.distance_bias(heads, info.q_index, info.kv_index), np.float64)
        scores = scores + bias.reshape(bias.shape[0], -1, *bias.shape[3:])
    allowed = info.get_mask(window=scoring.window, chunk=scoring.chunk)
    scores = np.where(np.asarray(allowed)[:, None], scores, -np.inf)
    top = np.max(scores, axis=-1, keepdims=True, initial=-1e30)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if scoring.sinks is not None:
        sinks = np.asarray(scoring.sinks, np.float64)[None, :, None, None]
        total = np.where(total > 0, total + np.exp(np.minimum(sinks - top, 700)), total)
    weights = weights / np.where(total == 0, 1, total)
    return np.einsum("bhst,bthd->bshd", weights, v)


def near(ours: jax.Array, expected: np.ndarray) -> None:
    slack = 2**-7 if ours.dtype == jnp.bfloat16 else 2e-5
    np.testing.assert_allclose(np.asarray(ours, np.float64), expected, rtol=slack, atol=slack)


def projected(rng, sizes, heads, dims, causal, scoring, dtype="float32", *, same=True):
    """A call with separate keys; `same`: keys of the same tokens as the queries."""
    (b, s, t), (h, g), (k, d) = sizes, heads, dims
    q = drawn(rng, b, s, h, k, dtype=dtype)
    keys, values = drawn(rng, b, t, g, k, dtype=dtype), drawn(rng, b, t, g, d, dtype=dtype)
    of_queries = MaskInfo.from_segments(segments(rng, b, s), causal)
    of_keys = of_queries if same and s == t else MaskInfo.from_segments(segments(rng, b, t), causal)
    info = replace(
        of_queries,
        kv_segment_ids=of_keys.kv_segment_ids,
        kv_index=of_keys.kv_index,
        in_order=False,
    )
    return Projected(name="flash_attn2", q=q, k=keys, v=values, mask_info=info, scoring=scoring)


def scoring_of(rng, h, k, window, chunk, cap, sinks, biases=(), *, causal=True) -> Scoring:
    sink = drawn(rng, h) if sinks else None
    relative, alibi = None, None
    if "relative" in biases:
        relative = RelativeBias(drawn(rng, 8, h), max_distance=20, causal=causal)
    if {"alibi", "rounded"} & set(biases):
        dtype = "bfloat16" if "rounded" in biases else None
        alibi = Alibi(tuple(rng.uniform(0, 0.5, h).tolist()), factor=0.7, dtype=dtype)
    scoring = Scoring(scale=k**-0.5, window=window, chunk=chunk, soft_cap=cap, sinks=sink)
    return replace(scoring, relative=relative, alibi=alibi)


@pytest.mark.nightly
@settings(max_examples=8, deadline=None)
@given(
    s=SIZES,
    t=SIZES,
    heads=HEADS,
    dims=st.sampled_from([(8, 8), (5, 19), (64, 64)]),
    causal=st.booleans(),
    window=LIMITS,
    chunk=LIMITS,
    cap=CAPS,
    sinks=st.booleans(),
    biases=BIASES,
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 99),
)
def test_native_prompt_attention_is_exact(
    s, t, heads, dims, causal, window, chunk, cap, sinks, biases, dtype, seed
):
    rng = np.random.default_rng(seed)
    limits = (window, chunk, cap, sinks)
    scoring = scoring_of(rng, heads[0], dims[0], *limits, biases, causal=causal)
    call = projected(rng, (2, s, t), heads, dims, causal, scoring, dtype, same=bool(seed % 2))
    assert not native.KERNELS[0].refusals(call)
    near(native.attend_prompt(call), exact(call.q, call.k, call.v, call.mask_info, scoring))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("causal", "window", "chunk", "cap", "sinks", "dims"),
    [
        (True, None, None, None, False, (16, 16)),
        (True, jnp.int32(20), None, 4.0, True, (16, 24)),
        (False, 9, 32, None, True, (7, 16)),
    ],
)
def test_gradients_are_those_of_plain_xla(causal, window, chunk, cap, sinks, dims, dtype) -> None:
    rng = np.random.default_rng(0)
    scoring = scoring_of(rng, 6, dims[0], window, chunk, cap, sinks)
    call = projected(rng, (2, 149, 149), (6, 2), dims, causal, scoring, dtype)
    weights = drawn(rng, 2, 149, 6, dims[1], dtype=dtype).astype(jnp.float32)
    sinks_given = () if scoring.sinks is None else (scoring.sinks,)

    def loss(run):
        def of(q, k, v, *sinks):
            own = replace(scoring, sinks=sinks[0] if sinks else None)
            return jnp.sum(run(replace(call, q=q, k=k, v=v, scoring=own)) * weights)

        return jax.grad(of, argnums=tuple(range(3 + len(sinks_given))))

    ours = loss(native.attend_prompt)(call.q, call.k, call.v, *sinks_given)
    wide = (x.astype(jnp.float32) for x in (call.q, call.k, call.v))
    plain = loss(blockwise_attention)(*wide, *sinks_given)
    for own, other in zip(ours, plain, strict=True):
        # float32: sums over all queries or keys, added block by block in another order. bfloat16:
        # weights, gradients of scores, and results have eight bits.
        slack = 1e-4 if dtype == "float32" else 2**-7
        atol = slack * (1 if dtype == "float32" else float(jnp.abs(other).max()))
        np.testing.assert_allclose(own.astype(jnp.float32), other, rtol=slack, atol=atol)


@pytest.mark.nightly
@pytest.mark.parametrize("alibi", [None, Alibi((0.5, 0.25, 0.02, 0.003), 0.7, "bfloat16")])
@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("reach", [9, 128])
def test_biases_by_distance_and_dropout_equal_plain_xla(rate: float, reach: int, alibi) -> None:
    rng = np.random.default_rng(reach)
    causal = reach == 9
    key = jax.random.key(1) if rate else None
    cap, window = (None, None) if alibi is None else (4.0, 30)
    scoring = Scoring(1.0, window, soft_cap=cap, alibi=alibi, dropout=rate, dropout_key=key)
    call = projected(rng, (2, 80, 80), (4, 2), (16, 16), causal, scoring)
    if reach == 128:  # keys in order, all of one segment
        call = replace(call, mask_info=MaskInfo.full(2, 80, causal=causal))
    relative = RelativeBias(drawn(rng, 8, 4), max_distance=reach, causal=causal)
    weights = drawn(rng, 2, 80, 4, 16)

    def results(run):
        def of(q, k, v, table):
            own = replace(scoring, relative=replace(relative, table=table))
            out = run(replace(call, q=q, k=k, v=v, scoring=own))
            return jnp.sum(out * weights), out

        return jax.grad(of, argnums=(0, 1, 2, 3), has_aux=True)

    arrays = (call.q, call.k, call.v, relative.table)
    ours, out = results(native.attend_prompt)(*arrays)
    plain, expected = results(vanilla_attention)(*arrays)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
    for own, other in zip(ours, plain, strict=True):
        # Sums over all queries or keys, added block by block in another order.
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-4)


def stored_as(x: jax.Array, kind: str):
    if kind in ("int8", "fp8"):
        return Format(kind, 4).encode(x)
    return x.astype(kind)


@pytest.mark.nightly
@settings(max_examples=8, deadline=None)
@given(
    s=st.integers(1, 20),
    t=st.integers(1, 200),
    heads=HEADS,
    kind=st.sampled_from(["float32", "bfloat16", "int8", "fp8"]),
    layered=st.booleans(),
    window=LIMITS,
    cap=CAPS,
    sinks=st.booleans(),
    biases=BIASES,
    seed=st.integers(0, 99),
)
def test_caches_are_read_where_they_lie(
    s, t, heads, kind, layered, window, cap, sinks, biases, seed
):
    rng = np.random.default_rng(seed)
    h, g = heads
    lead = (3,) if layered else ()
    keys, values = (stored_as(drawn(rng, *lead, 2, g, t, 8), kind) for _ in range(2))
    written = rng.integers(0, t + 1, (2, 1))
    slots = np.arange(t, dtype=np.int32)[None]
    info = MaskInfo(
        jnp.asarray(rng.integers(0, 2, (2, s)), jnp.int32),
        jnp.asarray(slots < written, jnp.int32),
        jnp.asarray(np.maximum(written - s + np.arange(s), 0), jnp.int32),
        jnp.asarray(np.broadcast_to(slots, (2, t))),
    )
    at = (jnp.int32(1),) if layered else ()
    stored = StoredLayer(keys, values, at, info, "leaves", ordered=True)
    scoring = scoring_of(rng, h, 8, window, None, cap, sinks, biases)
    q = drawn(rng, 2, s, h, 8)
    name = "autoregressive_decodeattn"
    call = Cached(name=name, q=q, scoring=scoring, stored=stored)
    assert not native.KERNELS[1].refusals(call)
    k, v = (decode_numbers(x, "float32").swapaxes(1, 2) for x in (stored.k, stored.v))
    near(native.cache_attention(call), exact(q, k, v, info, scoring))


@pytest.mark.nightly
@settings(max_examples=8, deadline=None)
@given(
    heads=HEADS,
    kind=st.sampled_from(["float32", "bfloat16", "int8", "fp8"]),
    page_size=st.sampled_from([1, 4, 16]),
    lens=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 90)), min_size=1, max_size=4),
    window=LIMITS,
    cap=CAPS,
    sinks=st.booleans(),
    biases=BIASES,
    seed=st.integers(0, 99),
)
def test_pages_are_read_where_they_lie(
    heads, kind, page_size, lens, window, cap, sinks, biases, seed
) -> None:
    rng = np.random.default_rng(seed)
    h, g = heads
    n, most = len(lens) + 1, 112 // page_size  # one sequence slot is empty
    pool_size = n * most
    numbers = drawn(rng, 2, pool_size, page_size, g, 2, 8)
    pool = numbers.astype(kind) if "float" in kind else None
    if pool is None:
        codes = Format(kind, None).encode(jnp.moveaxis(numbers, 2, 4))
        pool = Codes(jnp.moveaxis(codes.values, 4, 2), codes.scale)
        numbers = jnp.moveaxis(decode_numbers(codes, "float32"), 4, 2)
    else:
        numbers = pool.astype("float32")
    table = rng.permutation(pool_size).reshape(n, most).astype(np.int32)
    offsets = np.cumsum([0, *(s for s, _ in lens)])
    tokens = int(offsets[-1]) + 2  # two of padding
    ragged = RaggedBatch(
        cu_q_lens=jnp.asarray([*offsets, offsets[-1]], jnp.int32),
        kv_lens=jnp.asarray([*(s + before for s, before in lens), 0], jnp.int32),
        seq_of_token=jnp.zeros((tokens,), jnp.int32),
        slots={},
        page_table={"full": jnp.asarray(table)},
        state_slots=jnp.zeros((n,), jnp.int32),
        num_seqs=jnp.int32(len(lens)),
    )
    scoring = scoring_of(rng, h, 8, window, None, cap, sinks, biases)
    q = drawn(rng, tokens, h, 8)
    name = "ragged_page_attention_v3"
    call = Paged(
        name=name,
        q=q,
        scoring=scoring,
        pages=Pages(pool, (jnp.int32(1),), "full"),
        ragged=ragged,
    )
    assert not native.KERNELS[2].refusals(call)
    out = native.page_attention(call)
    for i, (s, before) in enumerate(lens):
        rows = numbers[1][table[i]].reshape(1, -1, g, 2, 8)[:, : s + before]
        at = jnp.arange(s + before, dtype=jnp.int32)[None]
        info = MaskInfo(jnp.ones((1, s), jnp.int32), jnp.ones_like(at), at[:, before:], at)
        own = slice(int(offsets[i]), int(offsets[i + 1]))
        expected = exact(q[own][None], rows[..., 0, :], rows[..., 1, :], info, scoring)
        near(out[own], expected[0])
    assert not np.asarray(out[-2:]).any()


@pytest.mark.nightly
def test_a_row_does_not_depend_on_its_company() -> None:
    rng = np.random.default_rng(0)
    scoring = Scoring(scale=0.25)
    call = projected(rng, (3, 130, 130), (6, 2), (16, 16), True, scoring)
    whole = np.asarray(native.attend_prompt(call))
    row = jax.tree.map(lambda x: x[1:2], (call.q, call.k, call.v, call.mask_info))
    q, k, v, info = row
    alone = native.attend_prompt(replace(call, q=q, k=k, v=v, mask_info=info))
    np.testing.assert_array_equal(np.asarray(alone)[0], whole[1])


def test_unsupported_native_attention_states_reasons() -> None:
    rng = np.random.default_rng(0)
    call = projected(rng, (1, 4, 4), (2, 1), (8, 8), True, Scoring(scale=1.0))
    kernel = native.KERNELS[0]
    assert kernel in kernels_here(call)
    half = replace(call, scoring=replace(call.scoring, softmax_dtype="bfloat16"))
    biased = replace(call, scoring=replace(call.scoring, bias=jnp.zeros((1, 1, 4, 4))))
    narrow = replace(call, q=call.q.astype("float16"))
    alibi = Alibi((0.5, 0.25), dtype="float16")
    rounded = replace(call, scoring=replace(call.scoring, alibi=alibi))
    for refused, words in (
        (half, "a softmax in"),
        (biased, "a bias"),
        (narrow, "float16"),
        (rounded, "ALiBi rounded to float16"),
    ):
        assert any(words in reason for reason in kernel.refusals(refused))


def test_nan_does_not_spread_to_other_rows() -> None:
    rng = np.random.default_rng(0)
    call = projected(rng, (2, 5, 5), (2, 1), (8, 8), True, Scoring(scale=1.0))
    info = MaskInfo.full(2, 5)
    call = replace(call, mask_info=info, k=call.k.at[1, 2].set(jnp.nan))
    out = np.asarray(native.attend_prompt(call))
    assert np.isfinite(out[0]).all()
    assert np.isfinite(out[1, :2]).all()
    assert np.isnan(out[1, 2:]).all()
