"""Self-attention: projections, norms, rotary positions, attention, output projection.

Legend: b batch, s sequence, d hidden, h heads, g kv heads, k head dim.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError
from ed_infra.masks import MaskInfo
from flax import nnx
from jaxtyping import Array, Float

from ed_layers import attention
from ed_layers.attention.blocks.settings import (
    Disentangled,
    MaskRule,
    Position,
    QKNorm,
    RelativeBuckets,
    Rotary,
    ScoreRule,
)
from ed_layers.attention.scoring import Alibi, RelativeBias, Scoring
from ed_layers.cache.spec import LayerCacheSpec, LayerSpecs
from ed_layers.context import Ctx
from ed_layers.fixed_order import KernelChoice
from ed_layers.parts import Parts
from ed_layers.projections.linear import project
from ed_layers.rotary import apply_rotary

if TYPE_CHECKING:
    from ed_layers.attention.blocks.stored_projection import ProjectedKeys
    from ed_layers.cache.protocol import Cache
    from ed_layers.cache.storage import Layer

#: Term of disentangled attention -> the projection of the table of relative positions.
OWN_PROJECTIONS = {"c2p": "pos_key_proj", "p2c": "pos_query_proj"}

_CacheT = TypeVar("_CacheT", bound="Cache | None")


class SelfAttention(nnx.Module):
    """Grouped-query self-attention; Hugging Face's names: `q_proj`, `k_proj`, `v_proj`, `o_proj`.

    Args:
        parts: creates the projections.
        heads, kv_heads, head_dim: h, g and k; None = the configuration's `num_attention_heads`,
            `num_key_value_heads`, `head_dim`.
        bias: whether the projections of queries, keys and values have a bias.
        key_bias, value_bias, out_bias, gate_bias: whether the projection of the keys, that of the
            values, that of the outputs, and that of the gate, has a bias; None = same as `bias`.
        position: the position encoding; None = none.
        mask: which tokens a token attends to. A bidirectional layer has no cache. A decoder whose
            configuration has `is_causal: false` or `use_bidirectional_attention: true` is
            bidirectional.
        norm: norms of queries and keys.
        scores: scale and limits of the scores.
        gated: multiply the outputs by the sigmoid of a projection `g_proj` (Qwen3-Next).
        group: name of the cache group; layers of one group have equal g and k.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        heads: int | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        key_bias: bool | None = None,
        value_bias: bool | None = None,
        out_bias: bool | None = None,
        gate_bias: bool | None = None,
        position: Position = Rotary(),  # noqa: B008
        mask: MaskRule = MaskRule(),  # noqa: B008
        norm: QKNorm = QKNorm(),  # noqa: B008
        scores: ScoreRule = ScoreRule(),  # noqa: B008
        gated: bool = False,
        group: str = "full",
    ):
        config = parts.config
        if is_bidirectional(config):
            mask = replace(mask, causal=False)
        d, h = config.hidden_size, heads or config.num_attention_heads
        g = kv_heads or get_num_kv_heads(config)
        self.head_dim = k = head_dim or getattr(config, "head_dim", None) or d // h
        self.q_proj = parts.linear(d, h * k, axes=("embed", "heads"), bias=bias)
        key_bias = bias if key_bias is None else key_bias
        self.k_proj = parts.linear(d, g * k, axes=("embed", "kv_heads"), bias=key_bias)
        value_bias = bias if value_bias is None else value_bias
        self.v_proj = parts.linear(d, g * k, axes=("embed", "kv_heads"), bias=value_bias)
        if isinstance(position, Disentangled) and not position.shared:
            for term in position.terms:
                name = OWN_PROJECTIONS[term]
                setattr(self, name, parts.linear(d, h * k, axes=("embed", "heads"), bias=True))
        if gated:
            gate_bias = bias if gate_bias is None else gate_bias
            self.g_proj = parts.linear(d, h * k, axes=("embed", "heads"), bias=gate_bias)
        self.gated = gated
        out_bias = bias if out_bias is None else out_bias
        self.o_proj = parts.linear(h * k, d, axes=("heads", "embed"), bias=out_bias)
        if norm.make is not None:
            shapes = {"each": lambda n: (k,), "own": lambda n: (n, k), "all": lambda n: (n * k,)}
            self.q_norm, self.k_norm = (norm.make(*shapes[norm.heads](n)) for n in (h, g))
        if scores.sinks:
            self.sinks = nnx.Param(jnp.zeros((h,), parts.param_dtype), axes=("heads",))
        self.norm_heads = None if norm.make is None else norm.heads
        self.norm_last, self.clip = norm.last, norm.clip
        self.position, self.mask, self.scores = position, mask, scores
        used = {
            "bidirectional": not mask.causal,
            "window": mask.window is not None,
            "chunk": mask.chunk is not None,
            "soft_cap": scores.soft_cap is not None,
            "sinks": scores.sinks,
            "alibi": isinstance(position, Alibi),
            "relative": isinstance(position, RelativeBuckets),
            "bias": isinstance(position, Disentangled),
        }
        self.mechanism = attention.Mechanism.resolve(
            config,
            features=frozenset(name for name, is_used in used.items() if is_used),
            dropout=getattr(config, "attention_dropout", 0.0),
        )
        spec = LayerCacheSpec(g, k, window=mask.window, group=group)
        self.cache_spec: LayerSpecs = spec if mask.causal else ()
        self.group = spec.group

    def __call__(
        self, x: Float[Array, "b s d"], ctx: Ctx, cache: _CacheT, layer: Layer
    ) -> tuple[Float[Array, "b s d"], _CacheT]:
        """Return the output of the attention [b, s, d], and the cache."""
        x = ctx.name_activation(x, "normed_input")
        writer = self.build_writer(x, ctx)
        if writer is not None and ctx.ragged is not None:
            out, cache = attention.attend_and_write(
                *(writer, self.scoring(ctx)),
                cache=cache,
                layer=layer,
                ragged=ctx.ragged,
                group=self.group,
                mechanism=self.mechanism,
            )
        else:
            q, k, v = self.compute_qkv(x, ctx)
            out, cache = self.attend(q, k, v, ctx, cache, layer)
        if self.gated:
            out = out * jax.nn.sigmoid(self.g_proj(x, ctx)).reshape(out.shape)
        out = ctx.name_activation(out, "attn_output")
        out = ctx.project_to_stream(self.o_proj, out.reshape(*x.shape[:2], -1))
        return ctx.name_activation(out, "attn_dense"), cache

    def build_writer(self, x: Float[Array, "1 T d"], ctx: Ctx) -> ProjectedKeys | None:
        """Return the kernel that projects queries, keys and values of a serving step and writes
        them into pages; None if it does not compute this layer."""
        if ctx.ragged is None or not KernelChoice.get_current().on_one_gpu:
            return None
        from ed_layers.attention.blocks.stored_projection import ProjectedKeys

        block, layers = type(self), (self.q_proj, self.k_proj, self.v_proj)
        is_usual = all(
            getattr(block, name) is getattr(SelfAttention, name)
            for name in ("compute_qkv", "project_qkv", "attend")
        )
        norms = ()
        if self.norm_heads is not None:
            norms = (self.q_norm, self.k_norm)
        is_usual &= not norms or (self.norm_heads == "each" and not self.norm_last)
        is_usual &= self.clip is None and not isinstance(self.position, Disentangled)
        if not is_usual or self.mechanism.dtype not in (None, self.q_proj.dtype):
            return None
        rotary = self.position if isinstance(self.position, Rotary) else None
        return ProjectedKeys.build(
            *(x, layers, norms),
            rope=None if rotary is None else ctx.rope[rotary.kind],
            interleaved=rotary is not None and rotary.interleaved,
            head_dim=self.head_dim,
            project=partial(self.compute_qkv, x, ctx),
        )

    def attend(
        self,
        q: Float[Array, "b s h k"],
        k: Float[Array, "b s g k"] | None,
        v: Float[Array, "b s g k"] | None,
        ctx: Ctx,
        cache: _CacheT,
        layer: Layer,
    ) -> tuple[Float[Array, "b s h k"], _CacheT]:
        """Return the weighted sums of values, and the cache."""
        scoring, mask_info = replace(self.scoring(ctx), dropout_key=ctx.key), ctx.mask_info
        if not self.mask.causal:
            mask_info = bidirectional(mask_info, cache)
        if isinstance(self.position, Disentangled):
            from ed_layers.attention.blocks.disentangled import disentangled_bias

            assert mask_info is not None
            assert k is not None
            tables, scale = self.positions_projected(ctx, self.position), scoring.scale
            bias = disentangled_bias(q, k, *tables, mask_info, self.position, scale)
            scoring = replace(scoring, bias=bias)
        return attention.attend_with_scoring(
            *(q, k, v, mask_info, scoring),
            cache=cache,
            layer=layer,
            ragged=ctx.ragged,
            group=self.group,
            mechanism=self.mechanism,
        )

    def positions_projected(
        self, ctx: Ctx, form: Disentangled
    ) -> tuple[Float[Array, "n h k"] | None, Float[Array, "n h k"] | None]:
        """Return queries and keys of the table of relative positions; None without their term."""
        table = get_bucket_table(ctx)
        projected_tables: dict[str, Float[Array, "n h k"]] = {}
        for term in form.terms:
            content_projection = self.q_proj if term == "p2c" else self.k_proj
            project_table = (
                content_projection if form.shared else getattr(self, OWN_PROJECTIONS[term])
            )
            projected_tables[term] = project_table(table).reshape(table.shape[0], -1, self.head_dim)
        return projected_tables.get("p2c"), projected_tables.get("c2p")

    def scoring(self, ctx: Ctx) -> Scoring:
        """Return the settings of the score function, without dropout."""
        position, scale, relative = self.position, self.scores.scale, None
        if isinstance(position, RelativeBuckets):
            relative = RelativeBias(
                get_bucket_table(ctx), position.max_distance, causal=self.mask.causal
            )
        return Scoring(
            scale=self.head_dim**-0.5 if scale is None else scale,
            window=self.mask.window,
            chunk=self.mask.chunk,
            soft_cap=self.scores.soft_cap,
            sinks=self.sinks.get_value() if hasattr(self, "sinks") else None,
            alibi=position if isinstance(position, Alibi) else None,
            relative=relative,
            softmax_dtype=self.mechanism.softmax_dtype,
        )

    def compute_qkv(
        self, x: Float[Array, "b s d"], ctx: Ctx
    ) -> tuple[Float[Array, "b s h k"], Float[Array, "b s g k"], Float[Array, "b s g k"]]:
        """Return queries, keys and values by head, with norms and rotary positions."""
        q, k, v = self.project_qkv(x, ctx)
        if isinstance(self.position, Rotary):
            table, interleaved = ctx.rope[self.position.kind], self.position.interleaved
            q = apply_rotary(q, table, interleaved=interleaved)
            k = k if k is None else apply_rotary(k, table, interleaved=interleaved)
        if self.norm_heads is not None and self.norm_last:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def project_qkv(
        self, x: Float[Array, "b s d"], ctx: Ctx
    ) -> tuple[Float[Array, "b s h k"], Float[Array, "b s g k"], Float[Array, "b s g k"]]:
        """Return queries, keys and values by head, normalized if the family has such norms."""
        q, k, v = project((self.q_proj, self.k_proj, self.v_proj), x, ctx)
        if self.norm_heads == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.clip is not None:
            q, k, v = (jnp.clip(y, -self.clip, self.clip) for y in (q, k, v))
        q, k, v = (y.reshape(*x.shape[:2], -1, self.head_dim) for y in (q, k, v))
        q, k = ctx.name_activation(q, "attn_query"), ctx.name_activation(k, "attn_key")
        if self.norm_heads in ("each", "own") and not self.norm_last:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, ctx.name_activation(v, "attn_value")


def get_bucket_table(ctx: Ctx) -> Float[Array, "n _"]:
    """Return the table of relative position buckets.

    Raises:
        ConfigError: the body did not set the table.
    """
    if ctx.buckets is None:
        raise ConfigError(
            "this layer has relative position buckets, but the context has no table of them: the "
            "body must set Ctx.buckets"
        )
    return ctx.buckets


def bidirectional(mask_info: MaskInfo | None, cache: Cache | None) -> MaskInfo:
    """Return a mask without causality.

    Raises:
        ConfigError: the call has a cache. Earlier tokens would have to attend to later ones.
    """
    if cache is not None or mask_info is None:
        raise ConfigError(
            "bidirectional attention needs all tokens in one call: call the encoder without a cache"
        )
    return replace(mask_info, causal=False)


def is_bidirectional(config: EasyDeLBaseConfig) -> bool:
    """Return whether a configuration makes an encoder of a decoder (GTE-Qwen, EmbeddingGemma)."""
    both_ways = getattr(config, "use_bidirectional_attention", None) is True
    return both_ways or not getattr(config, "is_causal", True)


def get_num_kv_heads(config: EasyDeLBaseConfig) -> int:
    """Return the number of key heads; without groups, the number of query heads."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads
