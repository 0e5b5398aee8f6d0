"""Llama (Touvron et al. 2023; Llama 3, 2024): the decoder that most others are variations of.

- pre-norm residual blocks, RMSNorm, no biases by default
- rotary positions on queries and keys, halves rotated; Llama 3's frequency scaling from the config
- grouped-query attention: `num_key_value_heads` keys and values serve `num_attention_heads` queries
- gated SiLU feed-forward
- head tied to the embedding where `tie_word_embeddings` says so

Numbers follow Hugging Face's `modeling_llama.py`; parameter names are its names.

Legend: b batch, s sequence, d hidden, h heads, g kv heads, k head dim.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.outputs import BaseModelOutput, Report
from ed_infra.registry import register_config, register_module
from ed_infra.sharding import constrain
from ed_layers.attention import Mechanism, attend
from ed_layers.cache import LayerCacheSpec
from ed_layers.context import Ctx
from ed_layers.embed import Embed
from ed_layers.linear import Linear
from ed_layers.mlp import GatedMLP
from ed_layers.named import named
from ed_layers.norms import RMSNorm
from ed_layers.remat import Remat
from ed_layers.rotary import apply_rotary
from ed_layers.stack import Stack
from flax import nnx

from ed_models.heads import CausalLM
from ed_models.inputs import layer_context
from ed_models.module import EasyDeLBaseModule
from ed_models.weights import STANDARD


@register_config("llama")
class LlamaConfig(EasyDeLBaseConfig, transformers.LlamaConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "llama"


class LlamaAttention(nnx.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: LlamaConfig, dtype, param_dtype, precision, *, rngs: nnx.Rngs):
        d, k = config.hidden_size, config.head_dim
        h, g = config.num_attention_heads, config.num_key_value_heads
        linear = partial(
            Linear,
            use_bias=config.attention_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=jax.nn.initializers.normal(config.initializer_range),
            rngs=rngs,
        )
        self.q_proj = linear(d, h * k, axes=("embed", "heads"))
        self.k_proj = linear(d, g * k, axes=("embed", "kv_heads"))
        self.v_proj = linear(d, g * k, axes=("embed", "kv_heads"))
        self.o_proj = linear(h * k, d, axes=("heads", "embed"))
        self.mechanism = Mechanism.resolve(config, dropout=config.attention_dropout)
        self.config = config

    def __call__(self, x, ctx: Ctx, cache, layer):
        b, s, _ = x.shape
        shape = b, s, -1, self.config.head_dim
        split, split_kv = (("batch", "sequence", heads, None) for heads in ("heads", "kv_heads"))
        q = named(self.q_proj(x, ctx).reshape(shape), "attn_query", split, self.config)
        k = named(self.k_proj(x, ctx).reshape(shape), "attn_key", split_kv, self.config)
        v = named(self.v_proj(x, ctx).reshape(shape), "attn_value", split_kv, self.config)
        q, k = apply_rotary(q, ctx.rope), apply_rotary(k, ctx.rope)
        out, cache = attend(
            q,
            k,
            v,
            ctx.mask_info,
            cache=cache,
            layer=layer,
            ragged=ctx.ragged,
            dropout_key=ctx.key,
            mechanism=self.mechanism,
        )
        out = named(out, "attn_output", split, self.config)
        out = self.o_proj(out.reshape(b, s, -1), ctx)
        return named(out, "attn_dense", ("batch", "sequence", "hidden"), self.config), cache


class LlamaDecoderLayer(nnx.Module):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, config: LlamaConfig, dtype, param_dtype, precision, *, rngs: nnx.Rngs):
        norm = partial(
            RMSNorm,
            config.hidden_size,
            eps=config.rms_norm_eps,
            dtype=dtype,
            param_dtype=param_dtype,
        )
        self.input_layernorm = norm()
        self.self_attn = LlamaAttention(config, dtype, param_dtype, precision, rngs=rngs)
        self.post_attention_layernorm = norm()
        self.mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            hidden_act=config.hidden_act,
            use_bias=config.mlp_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=jax.nn.initializers.normal(config.initializer_range),
            config=config,
            rngs=rngs,
        )
        self.config = config

    def __call__(self, x, ctx: Ctx, cache, layer):
        stream = ("batch", "sequence", "hidden")
        normed = named(self.input_layernorm(x), "normed_input", stream, self.config)
        attended, cache = self.self_attn(normed, ctx, cache, layer)
        x = named(x + attended, "residual", stream, self.config)
        normed = named(self.post_attention_layernorm(x), "normed_input", stream, self.config)
        x = x + self.mlp(normed, ctx)
        return constrain(x, stream, self.config), cache, Report()


class LlamaModel(EasyDeLBaseModule):
    """Embedding, decoder layers, final norm."""

    config_class = LlamaConfig
    WEIGHTS = STANDARD

    def __init__(
        self,
        config: LlamaConfig,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        *,
        rngs: nnx.Rngs,
    ):
        super().__init__(config, dtype, param_dtype, precision)
        self.embed_tokens = Embed(
            config.vocab_size,
            config.hidden_size,
            config=config,
            dtype=dtype,
            param_dtype=param_dtype,
            embedding_init=jax.nn.initializers.normal(config.initializer_range),
            rngs=rngs,
        )
        self.layers = Stack(
            lambda i, rngs: LlamaDecoderLayer(config, dtype, param_dtype, precision, rngs=rngs),
            config.num_hidden_layers,
            scan=config.scan_layers,
            remat=Remat.resolve(config),
            rngs=rngs,
        )
        self.norm = RMSNorm(
            config.hidden_size, eps=config.rms_norm_eps, dtype=dtype, param_dtype=param_dtype
        )

    def __call__(
        self,
        input_ids: Any = None,
        *,
        inputs_embeds: Any = None,
        past_key_values=None,
        output_hidden_states=False,
        **inputs,
    ) -> BaseModelOutput:
        """See `CausalLM.__call__`; returns hidden states [b, s, d]."""
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        b, s, _ = x.shape
        ctx, cache = layer_context(self.config, (b, s), cache=past_key_values, **inputs)
        x, cache, report, hidden = self.layers(x, ctx, cache, keep_hidden=output_hidden_states)
        return self.output(self.norm(x), ctx, cache, report, hidden)

    def cache_specs(self) -> list[LayerCacheSpec]:
        """What each layer keeps per token."""
        spec = LayerCacheSpec(self.config.num_key_value_heads, self.config.head_dim)
        return [spec] * self.config.num_hidden_layers


@register_module(TaskType.CAUSAL_LM, config=LlamaConfig, model_type="llama")
class LlamaForCausalLM(CausalLM):
    """Llama with a language-model head."""

    config_class = LlamaConfig
    body_class = LlamaModel
    WEIGHTS = STANDARD
