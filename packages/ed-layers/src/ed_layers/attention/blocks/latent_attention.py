"""Multi-head latent attention (DeepSeek-V2, 2024): keys and values of all heads are computed from
one short vector per token, the latent. A cache stores only the latent.

Legend: b batch, s sequence, t keys, d hidden, h heads, l latent (`kv_lora_rank`), n size of a key
without position (`qk_nope_head_dim`), p rotary size (`qk_rope_head_dim`), v size of a value
(`v_head_dim`), a size of a compressed query (`q_lora_rank`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.lax import PrecisionLike
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ed_layers import fixed_order
from ed_layers.attention import Mechanism, attend
from ed_layers.attention.blocks.sparse_index import (
    Chosen,
    Indexer,
    Places,
    Vectors,
    attend_to_places,
    by_token,
    in_pages,
    in_rows,
)
from ed_layers.cache import LayerCacheSpec
from ed_layers.cache.codes import decode_numbers
from ed_layers.cache.spec import LayerSpecs
from ed_layers.cache.storage import Layer
from ed_layers.context import ALL_LAYERS, Ctx
from ed_layers.parts import Parts
from ed_layers.projections.dot import Product
from ed_layers.projections.linear import Linear
from ed_layers.projections.matmul import matmul
from ed_layers.rotary import apply_rotary


class LatentAttention(nnx.Module):
    """Attention over latents.

    Parameters have Hugging Face's names: `q_a_proj`, `kv_a_proj_with_mqa`, `kv_b_proj`. A token has
    a latent [l] and a rotated key [p] that all heads share. `kv_b_proj` computes the key [n] and
    the value [v] of each head from the latent. Two methods produce the same numbers:

    - *expanded*, without a cache: the layer computes keys and values of all heads and attends as
      any other model. This method needs the fewest products for a whole sequence, and it has
      gradients;
    - *absorbed*, with a cache or one order of sums (`ed_layers.fixed_order`): the layer applies the
      key part of `kv_b_proj` to the queries, and the value part to the result. Attention reads the
      latents as one key head whose values are a part of its keys, so stored latents are never
      expanded. Prompts use this method too: a compiled step does not know whether the cache is
      empty. Within attention it costs `(2 l + p) / (n + p + v)` times the products of the expanded
      method (3.4 in DeepSeek-V3).

    The configuration provides the sizes: `num_attention_heads`, `q_lora_rank` (None = queries are
    not compressed), `kv_lora_rank`, `qk_nope_head_dim`, `qk_rope_head_dim`, `v_head_dim`,
    `attention_bias`.

    Args:
        parts: creates the projections.
        interleaved: rotary pairs are adjacent elements instead of halves.
        norm_eps: epsilon of the norms of both compressed vectors.
        scaled: multiply queries by `(d / a) ** 0.5` and latents by `(d / l) ** 0.5`
            (LongCat-Flash).
        group: name of the cache group; a layer with two attentions uses two groups.
        indexer: selects the keys that a query attends to (DeepSeek-V3.2).
    """

    #: Layers whose input is not the tokens of the batch, because their matrix is absorbed.
    without_tokens: ClassVar[tuple[str, ...]] = ("kv_b_proj",)

    def __init__(
        self,
        parts: Parts,
        *,
        interleaved: bool = True,
        norm_eps: float = 1e-6,
        scaled: bool = False,
        group: str = "full",
        indexer: Indexer | None = None,
    ):
        config = parts.config
        d, h, bias = config.hidden_size, config.num_attention_heads, config.attention_bias
        rank, q_rank = config.kv_lora_rank, config.q_lora_rank
        nope_dim, turned, v = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        if q_rank is None:
            self.q_proj = parts.linear(d, h * (nope_dim + turned), axes=("embed", "heads"))
        else:
            self.q_a_proj = parts.linear(d, q_rank, axes=("embed", None), bias=bias)
            self.q_a_layernorm = parts.norm(q_rank, eps=norm_eps)
            # "embed" lets fsdp shard these matrices, which are as large as any other.
            self.q_b_proj = parts.linear(q_rank, h * (nope_dim + turned), axes=("embed", "heads"))
        self.kv_a_proj_with_mqa = parts.linear(d, rank + turned, axes=("embed", None), bias=bias)
        self.kv_a_layernorm = parts.norm(rank, eps=norm_eps)
        self.kv_b_proj = parts.linear(rank, h * (nope_dim + v), axes=("embed", "heads"))
        # `expansion` reads this matrix without a latent, so no format may quantize latents.
        self.kv_b_proj.absorbed = True
        self.o_proj = parts.linear(h * v, d, axes=("heads", "embed"), bias=bias)
        self.heads, self.rank, self.plain, self.turned = h, rank, nope_dim, turned
        self.interleaved = interleaved
        self.q_scale = math.sqrt(d / q_rank) if scaled else 1.0
        self.kv_scale = math.sqrt(d / rank) if scaled else 1.0
        rope_parameters = getattr(config, "rope_parameters", None) or {}
        self.scale = (nope_dim + turned) ** -0.5 * yarn_factor(rope_parameters)
        used = {"value_dim": v != nope_dim + turned, "bias": indexer is not None}
        self.mechanism = Mechanism.resolve(
            config,
            features=frozenset(name for name, value in used.items() if value),
            dropout=config.attention_dropout,
        )
        spec = LayerCacheSpec(1, rank + turned, value_dim=rank, group=group, values_in_keys=True)
        self.latent_spec = spec
        self.cache_spec: LayerSpecs = spec
        if indexer is not None:
            self.indexer = indexer
            self.cache_spec = (spec, indexer.cache_spec)

    def __call__(
        self, x: Float[Array, "b s d"], ctx: Ctx, cache: Any, layer: Layer
    ) -> tuple[Float[Array, "b s d"], Any]:
        """Return the output of the attention [b, s, d], and the cache."""
        x = ctx.name_activation(x, "normed_input")
        compressed = self.compress_queries(x, ctx)
        q, latents = self.queries(compressed, ctx), self.latents(x, ctx)
        selection: Chosen = None
        if hasattr(self, "indexer"):
            selection, cache = self.indexer(x, compressed, ctx, cache, layer)
        if cache is None and not fixed_order.active():
            out = self.attend_to_heads(q, latents, ctx, selection)
        else:
            out, cache = self.attend_to_latents(q, latents, ctx, selection, cache, layer)
        out = ctx.name_activation(out, "attn_output")
        out = ctx.project_to_stream(self.o_proj, out.reshape(*x.shape[:2], -1))
        return ctx.name_activation(out, "attn_dense"), cache

    def compress_queries(self, x: Float[Array, "b s d"], ctx: Ctx) -> Float[Array, "b s a"]:
        """Return the input of the query projection."""
        return self.q_a_layernorm(self.q_a_proj(x, ctx)) if hasattr(self, "q_a_proj") else x

    def queries(self, x: Float[Array, "b s a"], ctx: Ctx) -> Float[Array, "b s h n+p"]:
        """Return the queries of all heads; their last p elements are rotated."""
        project = self.q_b_proj if hasattr(self, "q_b_proj") else self.q_proj
        q = project(x, ctx).reshape(*x.shape[:2], self.heads, -1)
        q = ctx.name_activation(q, "attn_query") * self.q_scale
        return self.turn(q, self.plain, ctx)

    def latents(self, x: Float[Array, "b s d"], ctx: Ctx) -> Float[Array, "b s 1 l+p"]:
        """Return the latent and the rotated key of each token, which a cache stores."""
        latent_and_key = ctx.name_activation(self.kv_a_proj_with_mqa(x, ctx), "attn_key_value")
        latent, key = jnp.split(latent_and_key, [self.rank], axis=-1)
        latent = self.kv_a_layernorm(latent) * self.kv_scale
        return self.turn(jnp.concatenate([latent, key], axis=-1)[:, :, None], self.rank, ctx)

    def turn(self, x: Float[Array, "b s h k"], first: int, ctx: Ctx) -> Float[Array, "b s h k"]:
        """Apply rotary positions to the elements from `first` on."""
        still, turning = jnp.split(x, [first], axis=-1)
        turning = apply_rotary(turning, ctx.rope[ALL_LAYERS], interleaved=self.interleaved)
        return jnp.concatenate([still, turning], axis=-1)

    def attend_to_heads(
        self,
        q: Float[Array, "b s h n+p"],
        latents: Float[Array, "b s 1 l+p"],
        ctx: Ctx,
        selection: Chosen,
    ) -> Float[Array, "b s h v"]:
        """Attend to the keys and values of all heads."""
        latent, turned = jnp.split(latents[:, :, 0], [self.rank], axis=-1)
        keys_values = self.kv_b_proj(latent, ctx).reshape(*latent.shape[:2], self.heads, -1)
        k, v = jnp.split(keys_values, [self.plain], axis=-1)
        k, v = ctx.name_activation(k, "attn_key"), ctx.name_activation(v, "attn_value")
        turned = jnp.broadcast_to(turned[:, :, None], (*k.shape[:-1], self.turned))
        k = jnp.concatenate([k, turned], axis=-1)
        return self.attend(q, k, v, ctx, selection, None, 0)[0]

    def attend_to_latents(
        self,
        q: Float[Array, "b s h n+p"],
        latents: Float[Array, "b s 1 l+p"],
        ctx: Ctx,
        selection: Chosen,
        cache: Any,
        layer: Layer,
    ) -> tuple[Float[Array, "b s h v"], Any]:
        """Attend to latents, of a cache if there is one."""
        key_expansion, value_expansion = jnp.split(self.expansion(q.dtype), [self.plain], axis=-1)
        precision = self.kv_b_proj.precision
        q_nope, turned = jnp.split(q, [self.plain], axis=-1)
        q_nope = _by_heads(q_nope, key_expansion.transpose(1, 2, 0), precision)
        q = jnp.concatenate([q_nope, turned], axis=-1)
        if isinstance(selection, Places):
            stored, cache = self.store_latents(latents, ctx, cache, layer)
            out = attend_to_places(by_token(q), selection, stored, self.scale, self.rank)
            out = out.reshape(*q.shape[:-1], self.rank)
        else:
            values = latents[..., : self.rank]
            out, cache = self.attend(q, latents, values, ctx, selection, cache, layer)
        return _by_heads(out, value_expansion.transpose(1, 0, 2), precision), cache

    def store_latents(
        self, latents: Float[Array, "b s 1 l+p"], ctx: Ctx, cache: Any, layer: Layer
    ) -> tuple[Vectors, Any]:
        """Return the latents that the tokens read, and the cache with the new latents."""
        kv, group, dtype = (latents, None), self.latent_spec.group, latents.dtype
        if ctx.ragged is not None:
            cache, pages = cache.update(layer, kv, ragged=ctx.ragged, group=group)
            return in_pages(pages, ctx.ragged, dtype), cache
        stored_latents = latents[:, :, 0]
        if cache is not None:
            cache, stored_layer = cache.update(layer, kv, mask_info=ctx.mask_info, group=group)
            stored_latents = decode_numbers(stored_layer.k, dtype)[:, 0]
        return in_rows(stored_latents, latents.shape[1]), cache

    def expansion(self, dtype: DTypeLike) -> Float[Array, "l h n+v"]:
        """Return the matrix of `kv_b_proj` by heads. For a layer that replaced `kv_b_proj`
        (quantized, or with an adapter), return its outputs for the unit vectors."""
        layer, weight = self.kv_b_proj, self.kv_b_proj.weight
        if type(layer) is not Linear or isinstance(weight, Product):
            weight = layer(jnp.eye(self.rank, dtype=dtype)[None])[0]
        return weight.astype(dtype).reshape(self.rank, self.heads, -1)

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        ctx: Ctx,
        selection: Chosen,
        cache: Any,
        layer: Layer,
    ) -> tuple[jax.Array, Any]:
        """Call `ed_layers.attention.attend` with the settings of this layer."""
        assert not isinstance(selection, Places), "`absorbed` reads places"
        return attend(
            q,
            k,
            v,
            ctx.mask_info,
            cache=cache,
            layer=layer,
            ragged=ctx.ragged,
            group=self.latent_spec.group,
            scale=self.scale,
            bias=selection,
            dropout_key=ctx.key,
            mechanism=self.mechanism,
        )


def _by_heads(
    x: Float[Array, "b s h i"], w: Float[Array, "h i o"], precision: PrecisionLike
) -> Float[Array, "b s h o"]:
    """Return the product of each head with its matrix."""
    if not fixed_order.active():
        return jnp.einsum("bshi,hio->bsho", x, w, precision=precision)
    heads = [matmul(x[:, :, h], w[h], precision=precision) for h in range(len(w))]
    return jnp.stack(heads, axis=2)


def yarn_factor(rope: Mapping[str, Any]) -> float:
    """Return YaRN's factor on the scale of the scores, if `mscale_all_dim` is set.

    Args:
        rope: `rope_parameters` of the configuration.
    """
    mscale, factor = rope.get("mscale_all_dim"), rope.get("factor") or 1.0
    if rope.get("rope_type", "default") == "default" or not mscale or factor <= 1:
        return 1.0
    return (0.1 * mscale * math.log(factor) + 1.0) ** 2
