"""Attention of the native library, as functions of arrays.

Legend: b batch, s query length, t key length or slots, h heads, g kv heads, k head dim of queries
and keys, d head dim of values, T flat tokens, n sequences, p pages of one, P pages, L layers,
m distances.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from ed_layers.native.library import TARGETS

#: Segments and order of queries and keys: int32 [b, s], [b, s], [b, t], [b, t].
Mask = Sequence[jax.Array]


class AttentionRule(NamedTuple):
    """The static settings of a call.

    Attributes:
        scale: factor on q·k.
        soft_cap: 0 = none.
        causal: whether a query sees no later keys; pages are always causal.
        dropout: probability that a weight is dropped; caches and pages have no dropout.
        alibi_factor: factor on the bias of `DistanceBiases.slopes`.
        alibi_rounded: whether slope times place of the key is rounded to bfloat16.
        fixed: whether sums have one order, see `ed_layers.fixed_order`.
    """

    scale: float
    soft_cap: float
    causal: bool
    dropout: float = 0.0
    alibi_factor: float = 1.0
    alibi_rounded: bool = False
    fixed: bool = False

    def scores(self) -> dict[str, object]:
        """Return the attributes of the scores; the library does not accept float64."""
        return {
            "scale": np.float32(self.scale),
            "soft_cap": np.float32(self.soft_cap),
            "alibi_factor": np.float32(self.alibi_factor),
            "alibi_rounded": self.alibi_rounded,
        }

    def attributes(self) -> dict[str, object]:
        """Return the attributes of prompts and training; the library does not accept int32."""
        limit = min(int(self.dropout * 2**32), 2**32 - 1)
        dropped = {"dropout": np.float32(self.dropout), "drop_below": np.int64(limit)}
        return {**self.scores(), "causal": self.causal, **dropped}


class DistanceBiases(NamedTuple):
    """Biases of the scores by distance: the index of the key minus that of the query.

    Attributes:
        distances: the bias of each distance from -(m // 2) to m // 2; other distances have the bias
            of the nearest one. Empty = none.
        slopes: ALiBi, the decrease of the score per token of distance; empty = none. The slopes
            have no gradient.
    """

    distances: Float[Array, "h m"]
    slopes: Float[Array, " h"]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_natively(
    rule: AttentionRule,
    q: Float[Array, "b s h k"],
    k: Float[Array, "b t g k"],
    v: Float[Array, "b t g d"],
    biases: DistanceBiases,
    mask: Mask,
    limits: Int[Array, " 2"],
    seed: Int[Array, " n"],
) -> tuple[Float[Array, "b s h d"], Float[Array, "b s h"]]:
    """Compute softmax attention, summed in float32, and the log-sum-exp of the scores of each
    query.

    Args:
        limits: window and chunk, 0 = none.
        seed: the two numbers that `ed_layers.attention.scoring.kept` draws from a key; empty = no
            dropout.

    Returns:
        The result in the dtype of `q`, and the log-sum-exp. For a query without visible keys, these
        are 0 and -inf.
    """
    return _forward(rule, q, k, v, biases, mask, limits, seed)


def _forward(rule, q, k, v, biases, mask, limits, seed):
    shape = (*q.shape[:3], v.shape[-1])
    results = jax.ShapeDtypeStruct(shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
    call = jax.ffi.ffi_call(TARGETS["ed_attention"], results, vmap_method="sequential")
    arguments = (q, k, v, *mask, limits, *biases, seed)
    out, lse = call(*arguments, **rule.attributes(), fixed=rule.fixed)
    return out, lse


def _forward_and_save(rule, q, k, v, biases, mask, limits, seed):
    # The results have names, so that a remat policy can keep them and avoid a second forward pass.
    results = _forward(rule, q, k, v, biases, mask, limits, seed)
    out, lse = checkpoint_name(results, "attn_output")
    return (out, lse), (q, k, v, biases, mask, limits, seed, out, lse)


def _backward(rule, saved, cotangents):
    q, k, v, biases, mask, limits, seed, out, lse = saved
    d_out, d_lse = cotangents
    wide = d_out.astype(jnp.float32), out.astype(jnp.float32)
    shared = jnp.sum(wide[0] * wide[1], axis=-1) - d_lse
    dtype = q.dtype if q.dtype == k.dtype == v.dtype else jnp.float32
    numbers = [x.astype(dtype) for x in (q, k, v, d_out)]
    results = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (q, k, v, biases.distances)]
    call = jax.ffi.ffi_call(TARGETS["ed_attention_back"], results, vmap_method="sequential")
    arguments = (*numbers[:3], *mask, limits, *biases, seed, lse, shared, numbers[3])
    *grads, d_distances = call(*arguments, **rule.attributes())
    qkv_grads = (d.astype(x.dtype) for d, x in zip(grads, (q, k, v), strict=True))
    return *qkv_grads, DistanceBiases(d_distances, jnp.zeros_like(biases.slopes)), None, None, None


attend_natively.defvjp(_forward_and_save, _backward)


def attend_slots(
    rule: AttentionRule,
    q: Float[Array, "b s h k"],
    keys: jax.Array,
    values: jax.Array,
    scales: tuple[jax.Array, jax.Array],
    layer: Int[Array, " 1"],
    mask: Mask,
    limits: Int[Array, " 2"],
    sinks: Float[Array, " h"],
    biases: DistanceBiases,
) -> Float[Array, "b s h d"]:
    """Compute attention to one layer of a contiguous cache, without a copy. No gradient.

    Args:
        keys, values: [L, b, g, t, k] and [L, b, g, t, d], or without the axis of layers; float32,
            bfloat16, int8 or float8_e4m3fn.
        scales: scales of codes, float32 [L, b, g, groups, t]; otherwise `no_scale()`.
        sinks: [0] = none.
    """
    result = jax.ShapeDtypeStruct((*q.shape[:3], values.shape[-1]), q.dtype)
    call = jax.ffi.ffi_call(TARGETS["ed_attention_cached"], result, vmap_method="sequential")
    attributes = {**rule.scores(), "causal": rule.causal, "fixed": rule.fixed}
    return call(q, keys, values, *scales, layer, *mask, limits, sinks, *biases, **attributes)


def attention_to_pages(
    rule: AttentionRule,
    q: Float[Array, "T h k"],
    pool: jax.Array,
    pool_scale: jax.Array,
    layer: Int[Array, " 1"],
    batch: Sequence[jax.Array],
    limits: Int[Array, " 2"],
    sinks: Float[Array, " h"],
    biases: DistanceBiases,
    *,
    value_dim: int,
) -> Float[Array, "T h d"]:
    """Compute causal attention of a flat batch to one layer of pages, without a copy. No gradient.

    Args:
        pool: [L, P, page_size, g, 2, k], or without the axis of layers, or with size 1 instead of
            2.
        pool_scale: scales of codes, float32 [L, P, g, 2, groups, page_size]; otherwise
            `no_scale()`.
        batch: int32 arrays of the sequences: offsets of their tokens [n + 1], their lengths [n],
            the number of used sequences [1], and their pages [n, p].
        sinks: [0] = none.
    """
    result = jax.ShapeDtypeStruct((*q.shape[:2], value_dim), q.dtype)
    call = jax.ffi.ffi_call(TARGETS["ed_attention_paged"], result, vmap_method="sequential")
    arguments = (q, pool, pool_scale, layer, *batch, limits, sinks, *biases)
    return call(*arguments, **rule.scores(), fixed=rule.fixed)


def no_scale() -> jax.Array:
    """Return the scales of numbers that are not codes: an empty array."""
    return jnp.zeros((0,), jnp.float32)
