"""Latent attention: absorbed = expanded, in a cache and in pages; cache content; the index."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.masks import MaskInfo
from ed_infra.rope.frequencies import inv_frequencies
from ed_layers.attention.blocks.latent_attention import LatentAttention, yarn_factor
from ed_layers.attention.blocks.sparse_index import (
    QUERY_BLOCK,
    Indexer,
    pages_of_tokens,
    read_tokens,
)
from ed_layers.cache import DenseCache, Format, PagedCache, RaggedBatch
from ed_layers.context import ALL_LAYERS, Ctx
from ed_layers.parts import Parts
from ed_layers.rotary import rope_tables
from flax import nnx

B, S, D, H = 2, 12, 16, 4
LATENT, PLAIN, TURNED, VALUE = 8, 6, 4, 10


class Config(EasyDeLBaseConfig):
    """What families with latents have besides."""

    hidden_size: int = D
    num_attention_heads: int = H
    head_dim: int = TURNED
    q_lora_rank: int | None = 12
    kv_lora_rank: int = LATENT
    qk_nope_head_dim: int = PLAIN
    qk_rope_head_dim: int = TURNED
    v_head_dim: int = VALUE
    attention_bias: bool = True
    attention_dropout: float = 0.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.3


class IndexConfig(Config):
    """And of families with an index."""

    index_n_heads: int = 3
    index_head_dim: int = 6
    index_topk: int = 4


@dataclasses.dataclass(frozen=True)
class Halves:
    """A matrix that is no array: the sum of two."""

    a: Any
    b: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.a.shape

    def product(self, x: jax.Array, *, precision: Any = None) -> jax.Array:
        return x @ self.a + x @ self.b


jax.tree_util.register_dataclass(Halves, ["a", "b"], [])


def layer(options: dict[str, Any] | None = None, **fields: Any) -> LatentAttention:
    config = Config(**fields, sharding_axis_dims=(1, 1, 1, 1, 1))
    module = LatentAttention(Parts(config, nnx.Rngs(0)), **options or {})
    noise = np.random.default_rng(1)
    state = nnx.state(module, nnx.Param)
    nnx.update(
        module, jax.tree.map(lambda a: a + noise.normal(size=a.shape, scale=0.1, loc=0), state)
    )
    return module


def inputs() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(B, S, D)), jnp.float32)


def context(positions: Any, mask: MaskInfo | None, ragged: RaggedBatch | None = None) -> Ctx:
    frequencies, _ = inv_frequencies(Config(), TURNED)
    tables = {ALL_LAYERS: rope_tables(jnp.asarray(positions), jnp.asarray(frequencies))}
    mode = "train" if ragged is None else "decode"
    return Ctx(jnp.asarray(positions), tables, mask_info=mask, ragged=ragged, mode=mode)


@jax.jit
def forward(state: Any, x: jax.Array) -> jax.Array:
    """Without a cache; the state equals the state of a split module."""
    mask = MaskInfo.from_segments(jnp.ones(x.shape[:2], jnp.int32))
    return merged(state)(x, context(mask.q_index, mask), None, 0)[0]


@jax.jit
def step(state: Any, x: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
    """A step of a contiguous cache."""
    cache, mask, positions = cache.begin(jnp.ones(x.shape[:2], jnp.int32))
    out, cache = merged(state)(x, context(positions, mask), cache, 0)
    return out, cache.advance(x.shape[1])


@jax.jit
def step_of_pages(state: Any, x: jax.Array, cache: Any, ragged: RaggedBatch) -> tuple[Any, Any]:
    """A step of flat tokens over pages."""
    return merged(state)(x, context(ragged.positions(), None, ragged), cache, 0)


def parted(module: LatentAttention) -> Any:
    """A module as an argument of a compiled function."""
    graphdef, state = nnx.split(module)
    return jax.tree_util.Partial(nnx.merge, graphdef), state


def merged(parts: Any) -> LatentAttention:
    merge, state = parts
    return merge(state)


def expanded(module: LatentAttention) -> np.ndarray:
    return np.asarray(forward(parted(module), inputs()))


def in_steps(module: LatentAttention, cache: Any, steps: tuple[int, ...]) -> tuple[np.ndarray, Any]:
    at, parts = 0, []
    for n in steps:
        part, cache = step(parted(module), inputs()[:, at : at + n], cache)
        at += n
        parts.append(np.asarray(part))
    return np.concatenate(parts, axis=1), cache


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {}),
        ({"q_lora_rank": None, "attention_bias": False}, {"interleaved": False}),
        ({"v_head_dim": PLAIN + TURNED}, {"scaled": True}),
    ],
    ids=["compressed queries", "plain queries, halves", "scaled, equal widths"],
)
def test_absorbed_attention_matches_expanded_attention(
    fields: dict[str, Any], options: dict[str, Any]
) -> None:
    module = layer(options, **fields)
    cache = DenseCache.create([module.latent_spec], batch_size=B, capacity=16)
    out, _ = in_steps(module, cache, (5, 1, 1, 5))
    np.testing.assert_allclose(out, expanded(module), atol=2e-6)


@pytest.mark.nightly
def test_absorbed_is_expanded_over_pages() -> None:
    module, page, width = layer(), 4, 4
    cache: Any = PagedCache.create([module.latent_spec], num_pages=B * width, page_size=page)
    table = np.random.default_rng(1).permutation(B * width).reshape(B, width).astype(np.int32)
    done, got = np.zeros(B, int), [[] for _ in range(B)]
    for counts in ([5, 1], [1, 5], [6, 6]):
        places = [np.arange(done[row], done[row] + n) for row, n in enumerate(counts)]
        slots = [table[row, at // page] * page + at % page for row, at in enumerate(places)]
        done, ends = done + counts, np.cumsum([0, *counts])
        ragged = RaggedBatch(
            cu_q_lens=jnp.asarray(ends, jnp.int32),
            kv_lens=jnp.asarray(done, jnp.int32),
            seq_of_token=jnp.asarray(np.repeat(range(B), counts), jnp.int32),
            slots={"full": jnp.asarray(np.concatenate(slots), jnp.int32)},
            page_table={"full": jnp.asarray(table)},
            state_slots=jnp.arange(B, dtype=jnp.int32),
            num_seqs=jnp.asarray(B, jnp.int32),
        )
        x = jnp.concatenate([inputs()[row, at] for row, at in enumerate(places)])[None]
        out, cache = step_of_pages(parted(module), x, cache, ragged)
        for row in range(B):
            got[row].append(np.asarray(out)[0, ends[row] : ends[row + 1]])
    whole = expanded(module)
    for row in range(B):
        np.testing.assert_allclose(np.concatenate(got[row]), whole[row], atol=2e-6)


@pytest.mark.nightly
def test_a_cache_holds_the_latent_and_nothing_else() -> None:
    module = layer()
    cache = DenseCache.create([module.latent_spec], batch_size=B, capacity=16)
    numbers = [leaf for leaf in jax.tree.leaves(cache) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert [leaf.shape for leaf in numbers] == [(1, B, 1, 16, LATENT + TURNED)]
    _, cache = in_steps(module, cache, (S,))
    mask = MaskInfo.from_segments(np.ones((B, S), np.int32))
    latents = module.latents(inputs(), context(mask.q_index, mask))
    np.testing.assert_allclose(cache.keys[0, :, 0, :S], latents[:, :, 0], atol=1e-6)


@pytest.mark.nightly
def test_quantized_latent_cache_stays_within_error_bound() -> None:
    module = layer()
    cache = DenseCache.create(
        [module.latent_spec], batch_size=B, capacity=16, format=Format("int8")
    )
    out, _ = in_steps(module, cache, (6, 6))
    whole = expanded(module)
    assert np.abs(out - whole).max() < 0.03 * np.abs(whole).max()


@pytest.mark.nightly
def test_a_matrix_that_is_no_array() -> None:
    module = layer()
    kernel = module.kv_b_proj.kernel.get_value()
    part = jnp.asarray(np.random.default_rng(4).normal(size=kernel.shape), jnp.float32)
    before = expanded(module)
    halves: Any = Halves(part, kernel - part)
    module.kv_b_proj.kernel.set_value(halves)
    np.testing.assert_allclose(expanded(module), before, atol=1e-5)
    cache = DenseCache.create([module.latent_spec], batch_size=B, capacity=16)
    np.testing.assert_allclose(in_steps(module, cache, (6, 6))[0], before, atol=1e-5)


def test_yarn_scales_logits_only_with_mscale_all_dim() -> None:
    yarn = {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0}
    assert yarn_factor({**yarn, "mscale_all_dim": 1.0}) == (0.1 * math.log(40) + 1) ** 2
    assert yarn_factor({**yarn, "mscale_all_dim": 0.5}) == (0.05 * math.log(40) + 1) ** 2
    assert yarn_factor(yarn) == 1
    assert yarn_factor({**yarn, "factor": 1.0, "mscale_all_dim": 1.0}) == 1
    assert yarn_factor({"rope_type": "default", "mscale_all_dim": 1.0, "factor": 4.0}) == 1


@pytest.mark.daily("None-stacked")
@pytest.mark.parametrize("layers", [None, 1], ids=["leaves", "stacked"])
@pytest.mark.parametrize("code", [None, "int8"])
def test_single_tokens_are_read_from_pages(code: str | None, layers: int | None) -> None:
    rng = np.random.default_rng(0)
    cache = PagedCache.create(
        [layer().latent_spec] * 2,
        num_pages=5,
        page_size=4,
        layout="leaves" if layers is None else "stacked",
        format=None if code is None else Format(code),
    )
    tokens, row = rng.normal(size=(1, 10, 1, LATENT + TURNED)).astype(np.float32), [3, 0, 4]
    ragged = RaggedBatch(
        cu_q_lens=jnp.asarray([0, 10], jnp.int32),
        kv_lens=jnp.asarray([10], jnp.int32),
        seq_of_token=jnp.zeros(10, jnp.int32),
        slots={"full": jnp.asarray([row[i // 4] * 4 + i % 4 for i in range(10)], jnp.int32)},
        page_table={"full": jnp.asarray([row], jnp.int32)},
        state_slots=jnp.zeros(1, jnp.int32),
        num_seqs=jnp.asarray(1, jnp.int32),
    )
    _, pages = cache.update(1, (jnp.asarray(tokens), None), ragged=ragged)
    wanted = jnp.asarray([9, 0, 5, 5, 2])
    got = read_tokens(pages, pages_of_tokens(pages, ragged)[0], wanted, jnp.float32)
    error = np.abs(got - tokens[0, wanted, 0]).max()
    assert error == 0 if code is None else 0 < error < 0.02


@pytest.mark.nightly
def test_an_index_keeps_the_best_keys_that_a_query_sees() -> None:
    config = IndexConfig(sharding_axis_dims=(1, 1, 1, 1, 1))
    index = Indexer(Parts(config, nnx.Rngs(0)), interleaved=True)
    rng = np.random.default_rng(0)
    # More queries than a block has, so that the last block is filled up.
    s = QUERY_BLOCK + 9
    q, weights, keys = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((B, s, 3, 6), (B, s, 3), (B, s, 6))
    )
    seen = np.tril(rng.random((B, s, s)) < 0.8)
    bias = np.asarray(jax.jit(index.bias)(q, weights, keys, jnp.asarray(seen)))
    assert bias.shape == (B, 1, s, s)
    scores = np.einsum(
        "bsit,bsi->bst", np.maximum(np.einsum("bsik,btk->bsit", q, keys), 0), weights
    )
    for row, query in np.ndindex(B, s):
        visible = np.flatnonzero(seen[row, query])
        best = visible[np.argsort(-scores[row, query, visible], kind="stable")[:4]]
        kept = np.flatnonzero(seen[row, query] & (bias[row, 0, query] == 0))
        assert set(kept) == set(best)
