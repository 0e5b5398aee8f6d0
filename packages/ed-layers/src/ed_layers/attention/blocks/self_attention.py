"""The attention block of decoders: projections, norms, rotary positions, attention, projection.

Legend: b batch, s sequence, d hidden, h heads, g kv heads, k head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ed_layers.attention import Mechanism, attend
from ed_layers.attention.scoring import Alibi, Scoring
from ed_layers.attention.weights import Watched
from ed_layers.cache import LayerCacheSpec
from ed_layers.cache.storage import Layer
from ed_layers.context import ALL_LAYERS, Ctx
from ed_layers.fused_projections import project
from ed_layers.parts import Parts
from ed_layers.rotary import apply_rotary


class SelfAttention(nnx.Module):
    """Grouped-query self-attention; Hugging Face's names: `q_proj`, `k_proj`, `v_proj`, `o_proj`.

    Args:
        parts: creates the projections.
        kv_heads, head_dim: g and k; None = the configuration's `num_key_value_heads`, `head_dim`.
        bias: whether the projections of queries, keys and values have a bias.
        out_bias: whether the output projection has a bias; None = same as `bias`.
        qk_norm: creates the norms of queries and keys (`q_norm`, `k_norm`) from the shape of the
            weights; None = no norms.
        norm_heads: "each": each head is normalized separately, all heads share the weights [k];
            "own": each head is normalized separately with its weights of [h, k]; "all": all heads
            are normalized together, with weights [h * k].
        norm_last: apply the norms after the rotary positions instead of before.
        clip: clip the projections to [-clip, clip] (OLMo, DBRX), after a norm over all heads
            (OLMoE).
        rope: name of the rotary tables: a layer type if `rope_parameters` has an entry per type,
            otherwise `ALL_LAYERS`; None = no rotary positions.
        interleaved: rotary pairs are adjacent elements instead of halves.
        window: a token attends to the last `window` tokens, including itself.
        chunk: a token attends only to its chunk of positions (Llama 4).
        soft_cap: bound of the scores (Gemma 2).
        scale: factor on the scores; None = `head_dim ** -0.5`.
        sinks: the softmax includes a trained logit per head (gpt-oss).
        alibi: a bias by distance, instead of rotary positions (MPT, Falcon).
        gated: multiply the outputs by the sigmoid of a projection `g_proj` (Qwen3-Next).
    """

    def __init__(
        self,
        parts: Parts,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        qk_norm: Callable[..., nnx.Module] | None = None,
        norm_heads: Literal["each", "own", "all"] = "each",
        norm_last: bool = False,
        clip: float | None = None,
        rope: str | None = ALL_LAYERS,
        interleaved: bool = False,
        window: int | None = None,
        chunk: int | None = None,
        soft_cap: float | None = None,
        scale: float | None = None,
        sinks: bool = False,
        alibi: Alibi | None = None,
        gated: bool = False,
    ):
        config = parts.config
        d, h, g = config.hidden_size, config.num_attention_heads, kv_heads or kv_heads_of(config)
        self.head_dim = k = head_dim or getattr(config, "head_dim", None) or d // h
        self.q_proj = parts.linear(d, h * k, axes=("embed", "heads"), bias=bias)
        self.k_proj = parts.linear(d, g * k, axes=("embed", "kv_heads"), bias=bias)
        self.v_proj = parts.linear(d, g * k, axes=("embed", "kv_heads"), bias=bias)
        if gated:
            self.g_proj = parts.linear(d, h * k, axes=("embed", "heads"), bias=bias)
        self.gated = gated
        out_bias = bias if out_bias is None else out_bias
        self.o_proj = parts.linear(h * k, d, axes=("heads", "embed"), bias=out_bias)
        if qk_norm is not None:
            shapes = {"each": lambda n: (k,), "own": lambda n: (n, k), "all": lambda n: (n * k,)}
            self.q_norm, self.k_norm = (qk_norm(*shapes[norm_heads](n)) for n in (h, g))
        if sinks:
            self.sinks = nnx.Param(jnp.zeros((h,), parts.param_dtype), axes=("heads",))
        self.normed = None if qk_norm is None else norm_heads
        self.norm_last = norm_last
        self.rope, self.interleaved, self.clip = rope, interleaved, clip
        self.window, self.chunk, self.soft_cap, self.scale = window, chunk, soft_cap, scale
        self.alibi = alibi
        used = {"window": window, "chunk": chunk, "soft_cap": soft_cap, "alibi": alibi}
        used["sinks"] = sinks or None
        self.mechanism = Mechanism.resolve(
            config,
            features=frozenset(name for name, value in used.items() if value is not None),
            dropout=getattr(config, "attention_dropout", 0.0),
        )
        self.cache_spec = LayerCacheSpec(g, k, window=window)
        self.group = self.cache_spec.group

    def __call__(
        self, x: Float[Array, "b s d"], ctx: Ctx, cache: Any, layer: Layer
    ) -> tuple[Float[Array, "b s d"], Any]:
        """Return the output of the attention [b, s, d], and the cache."""
        x = ctx.named(x, "normed_input")
        q, k, v = self.projected(x, ctx)
        if self.rope is not None:
            turn = ctx.rope[self.rope]
            q = apply_rotary(q, turn, interleaved=self.interleaved)
            k = k if k is None else apply_rotary(k, turn, interleaved=self.interleaved)
        if self.normed is not None and self.norm_last:
            q, k = self.q_norm(q), self.k_norm(k)
        out, cache = self.attended(q, k, v, ctx, cache, layer)
        if self.gated:
            out = out * jax.nn.sigmoid(self.g_proj(x, ctx)).reshape(out.shape)
        out = ctx.named(out, "attn_output")
        return ctx.named(self.o_proj(out.reshape(*x.shape[:2], -1), ctx), "attn_dense"), cache

    def attended(
        self,
        q: Float[Array, "b s h k"],
        k: Float[Array, "b s g k"] | None,
        v: Float[Array, "b s g k"] | None,
        ctx: Ctx,
        cache: Any,
        layer: Layer,
    ) -> tuple[Float[Array, "b s h k"], Any]:
        """Return the weighted sums of values, and the cache."""
        if ctx.watch is not None and k is not None and ctx.mask_info is not None:
            ctx.watch(Watched(q, k, ctx.mask_info, self.scoring()))
        return attend(
            q,
            k,
            v,
            ctx.mask_info,
            cache=cache,
            layer=layer,
            ragged=ctx.ragged,
            group=self.group,
            window=self.window,
            chunk=self.chunk,
            soft_cap=self.soft_cap,
            scale=self.scale,
            sinks=self.sinks.get_value() if hasattr(self, "sinks") else None,
            alibi=self.alibi,
            dropout_key=ctx.key,
            mechanism=self.mechanism,
        )

    def scoring(self) -> Scoring:
        """Return the settings of the score function, without dropout."""
        return Scoring(
            scale=self.head_dim**-0.5 if self.scale is None else self.scale,
            window=self.window,
            chunk=self.chunk,
            soft_cap=self.soft_cap,
            sinks=self.sinks.get_value() if hasattr(self, "sinks") else None,
            alibi=self.alibi,
            softmax_dtype=self.mechanism.softmax_dtype,
        )

    def projected(
        self, x: Float[Array, "b s d"], ctx: Ctx
    ) -> tuple[Float[Array, "b s h k"], Float[Array, "b s g k"], Float[Array, "b s g k"]]:
        """Return queries, keys and values by head, normalized if the family has such norms."""
        q, k, v = project((self.q_proj, self.k_proj, self.v_proj), x, ctx)
        if self.normed == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.clip is not None:
            q, k, v = (jnp.clip(y, -self.clip, self.clip) for y in (q, k, v))
        q, k, v = (y.reshape(*x.shape[:2], -1, self.head_dim) for y in (q, k, v))
        q, k = ctx.named(q, "attn_query"), ctx.named(k, "attn_key")
        if self.normed in ("each", "own") and not self.norm_last:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, ctx.named(v, "attn_value")


def kv_heads_of(config: Any) -> int:
    """Return the number of key heads; without groups, the number of query heads."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads
