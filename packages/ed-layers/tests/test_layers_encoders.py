"""Attention of encoders and encoder-decoders: no causality, relative positions, cross-attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError
from ed_infra.inputs import Encoded
from ed_infra.masks import MaskInfo
from ed_layers.attention.blocks.cross_attention import CrossAttention
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, RelativeBuckets
from ed_layers.cache import DenseCache, HybridCache, LayerCacheSpec, PagedCache, RaggedBatch
from ed_layers.context import Ctx
from ed_layers.parts import Parts
from flax import nnx

D, H, K, BUCKETS = 16, 4, 4, 8
SEGMENTS = jnp.asarray([[1, 1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 2, 2, 2, 2, 2, 0, 0]])


class Config(EasyDeLBaseConfig):
    model_type = "toy_encoder"
    hidden_size: int = D
    num_attention_heads: int = H
    attention_dropout: float = 0.0


def parts_of(**fields: Any) -> Parts:
    config = Config(sharding_axis_dims=(1, 1, 1, 1, 1), **fields)
    return Parts(config, nnx.Rngs(0))


def context(segments: jax.Array, **fields: Any) -> Ctx:
    info = MaskInfo.from_segments(segments)
    return Ctx(position_ids=info.q_index, rope={}, mask_info=info, **fields)


def hidden(shape: tuple[int, ...], seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (*shape, D))


@pytest.mark.nightly
@pytest.mark.parametrize("mechanism", ["vanilla", "blockwise", "sdpa", "flash_attn2"])
def test_bidirectional_attention_sees_the_whole_segment_and_nothing_else(mechanism: str) -> None:
    parts = parts_of(attn_mechanism=mechanism)
    layer = SelfAttention(parts, position=None, mask=MaskRule(causal=False))
    x = hidden(SEGMENTS.shape)
    y, _ = layer(x, context(SEGMENTS), None, 0)
    alone, _ = layer(x[:1, 5:8], context(jnp.ones((1, 3), jnp.int32)), None, 0)
    np.testing.assert_allclose(y[:1, 5:8], alone, atol=1e-5)
    moved, _ = layer(x.at[0, 4].add(1.0), context(SEGMENTS), None, 0)
    assert jnp.abs(moved - y)[0, 0].max() > 1e-3  # the first token sees the last of its segment
    np.testing.assert_array_equal(moved[0, 5:8], y[0, 5:8])


def test_bidirectional_attention_refuses_pages_and_caches() -> None:
    with pytest.raises(ConfigError, match="cannot do bidirectional"):
        SelfAttention(
            parts_of(attn_mechanism="ragged_page_attention_v3"),
            position=None,
            mask=MaskRule(causal=False),
        )
    layer = SelfAttention(parts_of(), position=None, mask=MaskRule(causal=False))
    assert layer.cache_spec == ()
    cache = DenseCache.create([LayerCacheSpec(H, K)], batch_size=2, capacity=9)
    with pytest.raises(ConfigError, match="without a cache"):
        layer(hidden(SEGMENTS.shape), context(SEGMENTS), cache, 0)


def test_layer_with_buckets_needs_their_table() -> None:
    layer = SelfAttention(parts_of(), position=RelativeBuckets())
    with pytest.raises(ConfigError, match=r"Ctx\.buckets"):
        layer(hidden((1, 3)), context(jnp.ones((1, 3), jnp.int32)), None, 0)
    with pytest.raises(ConfigError, match="'ring' cannot do relative"):
        SelfAttention(parts_of(attn_mechanism="ring"), position=RelativeBuckets())


def flat_batch(
    lengths: list[int], new: list[int], page_size: int, most: int
) -> tuple[RaggedBatch, int]:
    """A step in which sequence i has `lengths[i]` tokens, the last `new[i]` of them new."""
    n, total = len(lengths), sum(new)
    pages = -(-most // page_size)
    table = np.arange(n * pages).reshape(n, pages)
    seq = np.repeat(np.arange(n), new)
    position = np.concatenate([np.arange(a - b, a) for a, b in zip(lengths, new, strict=True)])
    slots = table[seq, position // page_size] * page_size + position % page_size
    padding = 3
    beyond = np.full(padding, n * pages * page_size)
    return RaggedBatch(
        cu_q_lens=jnp.asarray(np.concatenate([[0], np.cumsum(new)]), jnp.int32),
        kv_lens=jnp.asarray(lengths, jnp.int32),
        seq_of_token=jnp.asarray(np.concatenate([seq, np.zeros(padding, int)]), jnp.int32),
        slots={"full": jnp.asarray(np.concatenate([slots, beyond]), jnp.int32)},
        page_table={"full": jnp.asarray(table, jnp.int32)},
        state_slots=jnp.asarray(np.arange(n)[::-1] + 1, jnp.int32),
        num_seqs=jnp.asarray(n, jnp.int32),
    ), total


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["dense", "pages"])
def test_relative_buckets_are_exact_at_every_cache_offset(kind: str) -> None:
    layer = SelfAttention(parts_of(), position=RelativeBuckets(16))
    buckets = jax.random.normal(jax.random.key(5), (BUCKETS, H))
    s, prompt = 21, 13
    x = hidden((2, s))
    ones = jnp.ones((2, s), jnp.int32)
    whole, _ = layer(x, context(ones, buckets=buckets), None, 0)
    if kind == "dense":
        cache: Any = DenseCache.create([layer.cache_spec], batch_size=2, capacity=32)
        found = []
        for first, last in ((0, prompt), *((i, i + 1) for i in range(prompt, s))):
            cache, info, positions = cache.begin(ones[:, first:last])
            ctx = Ctx(position_ids=positions, rope={}, mask_info=info, buckets=buckets)
            y, cache = layer(x[:, first:last], ctx, cache, 0)
            cache = cache.advance(last - first)
            found.append(y)
        np.testing.assert_allclose(jnp.concatenate(found, 1), whole, atol=1e-5)
        return
    cache = PagedCache.create([layer.cache_spec], num_pages=16, page_size=4)
    steps = [([5, prompt], [5, prompt]), ([6, 14], [1, 1]), ([s, 15], [15, 1])]
    done = [0, 0]
    for lengths, new in steps:
        ragged, total = flat_batch(lengths, new, 4, 32)
        spans = [(i, slice(a, a + n)) for i, (a, n) in enumerate(zip(done, new, strict=True))]
        tokens = jnp.concatenate([x[i, at] for i, at in spans])
        flat = jnp.concatenate([tokens, jnp.zeros((3, D))])[None]
        ctx = Ctx(position_ids=ragged.positions(), rope={}, ragged=ragged, buckets=buckets)
        y, cache = layer(flat, ctx, cache, 0)
        expected = jnp.concatenate([whole[i, at] for i, at in spans])
        np.testing.assert_allclose(y[0, :total], expected, atol=1e-5)
        done = lengths


def encoded_of(segments: jax.Array) -> Encoded:
    return Encoded(hidden(segments.shape, seed=3), segments)


@pytest.mark.nightly
def test_cross_attention_stays_within_segments() -> None:
    layer = CrossAttention(parts_of())
    segments = jnp.asarray([[1, 1, 2, 0, 0], [1, 2, 2, 2, 0]])
    encoded = encoded_of(segments)
    x = hidden(SEGMENTS.shape)
    y, _ = layer(x, context(SEGMENTS, encoded=encoded), None, 0)
    one = Encoded(encoded.embeddings[1:, 1:4], jnp.ones((1, 3), jnp.int32))
    alone, _ = layer(x[1:, 2:7], context(jnp.ones((1, 5), jnp.int32), encoded=one), None, 0)
    np.testing.assert_allclose(y[1:, 2:7], alone, atol=1e-5)
    with pytest.raises(ConfigError, match="no encoder output"):
        layer(x, context(SEGMENTS), None, 0)


@pytest.mark.nightly
def test_cross_attention_reads_what_the_first_call_wrote() -> None:
    layer = CrossAttention(parts_of())
    segments = jnp.asarray([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]])
    encoded, x = encoded_of(segments), hidden((2, 4))
    whole, _ = layer(x, context(jnp.ones((2, 4), jnp.int32), encoded=encoded), None, 0)
    specs = [(LayerCacheSpec(H, K), layer.cache_spec)]
    cache: Any = HybridCache.create(specs, batch_size=2, capacity=8, cross_capacity=6)
    for i in range(4):
        cache, info, positions = cache.begin(jnp.ones((2, 1), jnp.int32))
        ctx = Ctx(position_ids=positions, rope={}, mask_info=info)
        ctx = replace(ctx, encoded=encoded) if i == 0 else ctx
        y, cache = layer(x[:, i : i + 1], ctx, cache, 0)
        cache = replace(cache, masks={})
        np.testing.assert_allclose(y, whole[:, i : i + 1], atol=1e-5)


@pytest.mark.nightly
def test_cross_attention_of_a_flat_batch_reads_the_slots_of_its_sequences() -> None:
    layer = CrossAttention(parts_of())
    specs = [(LayerCacheSpec(H, K), layer.cache_spec)]
    cache: Any = HybridCache.create_paged(
        specs, num_pages=16, page_size=4, num_states=4, cross_capacity=10
    )
    segments = [jnp.asarray([[1, 1, 1, 0, 0]]), jnp.ones((1, 10), jnp.int32)]
    outputs = [encoded_of(x) for x in segments]
    ragged, total = flat_batch([5, 1], [5, 1], 4, 16)
    x = hidden((1, 9))
    for sequence, encoded in enumerate(outputs):
        slot = ragged.state_slots[sequence]
        cache = layer.write(encoded, cache, 0, int(slot) if sequence else slot)
    ctx = Ctx(position_ids=ragged.positions(), rope={}, ragged=ragged)
    y, _ = layer(x, ctx, cache, 0)
    places = [slice(0, 5), slice(5, 6)]
    for encoded, at in zip(outputs, places, strict=True):
        ones = jnp.ones((1, at.stop - at.start), jnp.int32)
        alone, _ = layer(x[:, at], context(ones, encoded=encoded), None, 0)
        np.testing.assert_allclose(y[:, at], alone, atol=1e-5)
    assert total == 6


@pytest.mark.nightly
def test_slots_of_encoder_outputs_refuse_what_does_not_fit() -> None:
    layer = CrossAttention(parts_of())
    specs = [(LayerCacheSpec(H, K), layer.cache_spec)]
    with pytest.raises(ConfigError, match="cross_capacity"):
        HybridCache.create_paged(specs, num_pages=4, page_size=4, num_states=2)
    cache = HybridCache.create_paged(
        specs, num_pages=4, page_size=4, num_states=2, cross_capacity=4
    )
    with pytest.raises(ValueError, match="larger cross_capacity"):
        layer.write(encoded_of(jnp.ones((1, 5), jnp.int32)), cache, 0, 0)
    with pytest.raises(ValueError, match="one sequence"):
        layer.write(encoded_of(jnp.ones((2, 3), jnp.int32)), cache, 0, 0)
