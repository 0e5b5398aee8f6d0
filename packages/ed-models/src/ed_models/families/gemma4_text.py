"""Gemma 4, text (Gemma Team 2026): Gemma 3 whose last layers reuse earlier keys and values.

- layers with a window and layers without have different head sizes and rotary parameters
- the last `num_kv_shared_layers` read the keys and values of the last layer of their type before
  them; their feed-forward may be twice as wide (`use_double_wide_mlp`)
- values are normed, and may be the keys before their norm (`attention_k_eq_v`)
- each layer adds a separate embedding of the token and a projection of the embedded tokens
- `enable_moe_block`: experts in parallel to the feed-forward, routed by the stream before its norm
- only layers with a window attend to later tokens of an image

Numbers follow Hugging Face's `modeling_gemma4.py`; parameter names are its names.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.registry import register_config, register_module
from ed_infra.rope import frequencies as rope
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, QKNorm, Rotary, ScoreRule
from ed_layers.cache.shared import SharedKeys
from ed_layers.context import Ctx
from ed_layers.mlp import GatedMLP, activation
from ed_layers.moe.experts import Experts
from ed_layers.moe.layer import Router
from ed_layers.parts import Parts
from flax import nnx
from jaxtyping import Array, Float

from ed_models.body.ahead import looking_back
from ed_models.body.decoder import ScaledDecoder
from ed_models.body.gemma4_weights import GEMMA4_TEXT
from ed_models.body.layers import SandwichLayer, get_layer_window
from ed_models.tasks.causal_lm import CausalLM


@register_config("gemma4_text")
class Gemma4TextConfig(EasyDeLBaseConfig, transformers.Gemma4TextConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "gemma4_text"
    known_keywords = frozenset({"global_head_dim", "num_global_key_value_heads"})


@cache
def head_sizes(config: Gemma4TextConfig) -> tuple[tuple[int, int], ...]:
    """Key heads, and numbers of a head, of each layer."""
    layers = config.replace().per_layer_config  # transformers writes into copies: not into a seal
    return tuple((layer.num_key_value_heads, layer.head_dim) for layer in layers)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[f.name for f in fields(Ctx) if f.name not in ("mode", "config")] + ["per_layer"],
    meta_fields=["mode", "config"],
)
@dataclass(frozen=True)
class Gemma4TextCtx(Ctx):
    """The context, and the input of each layer besides the hidden states, [b, s, L, p]."""

    per_layer: Float[Array, "b s L p"] | None = None


class Gemma4TextAttention(SelfAttention):
    """Attention with own keys and values, or with those of an earlier layer."""

    def __init__(self, parts: Parts, index: int):
        config: Gemma4TextConfig = parts.config
        kind, (kv_heads, head_dim) = config.layer_types[index], head_sizes(config)[index]
        super().__init__(
            parts,
            kv_heads=kv_heads,
            head_dim=head_dim,
            bias=config.attention_bias,
            norm=QKNorm(parts.own_norm),
            position=Rotary(kind),
            mask=MaskRule(window=get_layer_window(config, index)),
            scores=ScoreRule(scale=1.0),
        )
        self.reads_only = config.kv_sharing_modes[index] == "reuse"
        if self.reads_only:
            del self.k_proj, self.v_proj, self.k_norm
            self.cache_spec = ()
            return
        self.v_norm = parts.norm(head_dim, weight=False)
        if config.attention_k_eq_v and kind != "sliding_attention":
            del self.v_proj

    def project_qkv(self, x, ctx) -> tuple[Any, Any, Any]:
        def heads(name: str, project):
            return ctx.name_activation(
                project(x, ctx).reshape(*x.shape[:2], -1, self.head_dim), name
            )

        q = self.q_norm(heads("attn_query", self.q_proj))
        if self.reads_only:
            return q, None, None
        k = heads("attn_key", self.k_proj)
        v = heads("attn_value", self.v_proj) if hasattr(self, "v_proj") else k
        return q, self.k_norm(k), self.v_norm(v)

    def attend(self, q, k, v, ctx, cache, layer):
        if self.mask.window is None:
            ctx = looking_back(ctx)
        if cache.cache is not None:
            return super().attend(q, k, v, ctx, cache, layer)
        kv = None if k is None else (k, v)
        cache, (k, v) = cache.update(layer, kv, group=self.group)
        return super().attend(q, k, v, ctx, None, layer)[0], cache


class Gemma4TextRouter(Router):
    """Reads the normed stream, scaled by feature; each expert has a factor on its weight."""

    def __init__(self, parts: Parts, experts: int, per_token: int):
        super().__init__(parts, experts, per_token)
        d = parts.config.hidden_size
        self.norm = parts.norm(d, weight=False)
        self.scale_of = nnx.Param(jnp.ones((d,), parts.param_dtype), axes=("norm",))
        self.per_expert_scale = nnx.Param(jnp.ones((experts,), parts.param_dtype), axes=(None,))

    def logits(self, x):
        scale = self.scale_of.get_value().astype(jnp.float32) * x.shape[-1] ** -0.5
        return super().logits(self.norm(x).astype(jnp.float32) * scale)

    def choose(self, logits, forced_ids=None):
        expert_ids, weights = super().choose(logits, forced_ids)
        return expert_ids, weights * self.per_expert_scale.get_value().astype(jnp.float32)[
            expert_ids
        ]


class Gemma4TextDecoderLayer(SandwichLayer):
    """Attention and feed-forward, each normed before and after, and the embedding of the layer."""

    def __init__(self, parts: Parts, index: int):
        config: Gemma4TextConfig = parts.config
        d, act = config.hidden_size, config.hidden_activation
        attention = Gemma4TextAttention(parts, index)
        twice = config.use_double_wide_mlp and attention.reads_only
        width = config.intermediate_size * (2 if twice else 1)
        super().__init__(parts, self_attn=attention, mlp=GatedMLP(parts, width, hidden_act=act))
        self.layer_scalar = nnx.Variable(jnp.ones((1,), parts.param_dtype), axes=(None,))
        self.is_sparse, self.hidden_act = config.enable_moe_block, act
        if self.is_sparse:
            experts = config.num_experts
            self.router = Gemma4TextRouter(parts, experts, config.top_k_experts)
            self.experts = Experts(parts, experts, config.moe_intermediate_size, hidden_act=act)
            self.post_feedforward_layernorm_1 = parts.own_norm(d)
            self.pre_feedforward_layernorm_2 = parts.own_norm(d)
            self.post_feedforward_layernorm_2 = parts.own_norm(d)
        self.has_own_input = bool(p := config.hidden_size_per_layer_input)
        if self.has_own_input:
            self.per_layer_input_gate = parts.linear(d, p, axes=("embed", None))
            self.per_layer_projection = parts.linear(p, d, axes=(None, "embed"))
            self.post_per_layer_input_norm = parts.own_norm(d)

    def __call__(self, x, ctx, cache, layer):
        x, cache, report = super().__call__(x, ctx, cache, layer)
        if self.has_own_input:
            gate = activation(self.hidden_act)(self.per_layer_input_gate(x, ctx))
            layer_input = self.per_layer_projection(
                gate * cast(Gemma4TextCtx, ctx).per_layer[:, :, layer], ctx
            )
            x = x + self.post_per_layer_input_norm(layer_input)
        return x * self.layer_scalar.get_value().astype(x.dtype), cache, report

    def branch(self, x, ctx):
        out, report = super().branch(x, ctx)
        if not self.is_sparse:
            return out, report
        expert_ids, weights, report = self.router(x, ctx)
        routed = self.experts(self.pre_feedforward_layernorm_2(x), expert_ids, weights, ctx)
        out = self.post_feedforward_layernorm_1(out) + self.post_feedforward_layernorm_2(routed)
        return out, report.under("router")


class Gemma4TextModel(ScaledDecoder):
    """Embeddings, decoder layers, final norm."""

    config_class = Gemma4TextConfig
    layer_class = Gemma4TextDecoderLayer

    @staticmethod
    def layer_kinds(config):
        return list(zip(config.layer_types, config.kv_sharing_modes, strict=True))

    @staticmethod
    def build_norm(parts):
        return partial(parts.norm, scale_first=True)

    def add_parts(self, parts):
        config: Gemma4TextConfig = parts.config
        if config.use_bidirectional_attention == "all":
            raise ConfigError(
                "use_bidirectional_attention='all' is an encoder, and this model is a decoder; "
                "omit it, or set it to 'vision', which has no effect on text"
            )
        if p := config.hidden_size_per_layer_input:
            d, n = config.hidden_size, config.num_hidden_layers * p
            rows, padding = config.vocab_size_per_layer_input, config.pad_token_id
            self.embed_tokens_per_layer = parts.embed(rows, n, padding=padding)
            self.per_layer_model_projection = parts.linear(d, n, axes=("embed", None))
            self.per_layer_projection_norm = parts.own_norm(p)

    def rope_settings(self):
        sizes = zip(self.config.layer_types, head_sizes(self.config), strict=True)
        return {kind: rope.settings(self.config, k, kind) for kind, (_, k) in dict(sizes).items()}

    def through(self, x, ctx, cache, input_ids, *, keep_hidden):
        modes = enumerate(self.config.kv_sharing_modes)
        shared = SharedKeys(cache, {}, tuple(i for i, mode in modes if mode == "store"))
        if p := self.config.hidden_size_per_layer_input:
            shared_fields = {field.name: getattr(ctx, field.name) for field in fields(ctx)}
            ctx = Gemma4TextCtx(**shared_fields, per_layer=self.per_layer(x, ctx, input_ids, p))
        x, shared, report, hidden = super().through(
            x, ctx, shared, input_ids, keep_hidden=keep_hidden
        )
        return x, cast(SharedKeys, shared).cache, report, hidden

    def per_layer(self, x, ctx, input_ids, features: int):
        """Return the per-layer inputs of each token, [b, s, L, p]."""
        if input_ids is None:
            raise ValueError(
                f"gemma4_text with hidden_size_per_layer_input={features} reads a second table of "
                "token embeddings: pass input_ids instead of inputs_embeds"
            )
        shape = (*x.shape[:2], -1, features)
        seen = self.per_layer_model_projection(x, ctx) * self.config.hidden_size**-0.5
        looked_up = self.embed_tokens_per_layer(input_ids) * jnp.asarray(features**0.5, x.dtype)
        seen = self.per_layer_projection_norm(seen.reshape(shape))
        return (seen + looked_up.reshape(shape)) * jnp.asarray(2**-0.5, x.dtype)


@register_module(TaskType.CAUSAL_LM, config=Gemma4TextConfig, model_type="gemma4_text")
class Gemma4TextForCausalLM(CausalLM):
    """Gemma 4 with a language-model head."""

    body_class = Gemma4TextModel
    WEIGHTS = GEMMA4_TEXT

    def head(self):
        return replace(super().head(), soft_cap=self.config.final_logit_softcapping)
