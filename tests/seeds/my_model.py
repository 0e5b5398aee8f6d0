"""The custom model of the guides: its own configuration class, a module with the mixins."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from ed_infra.enums import TaskType
from ed_infra.outputs import BaseModelOutput, Report
from ed_infra.registry import register_config, register_module
from ed_layers.attention import Mechanism, attend
from ed_layers.cache import LayerCacheSpec
from ed_layers.embed import Embed
from ed_layers.linear import Linear
from ed_layers.mlp import GatedMLP
from ed_layers.norms import RMSNorm
from ed_layers.rotary import apply_rotary
from ed_layers.stack import Stack
from ed_models.bridge import EasyBridgeMixin
from ed_models.generation import EasyGenerationMixin
from ed_models.heads import CausalLM
from ed_models.inputs import layer_context
from ed_models.module import EasyDeLBaseModule
from ed_models.weights import STANDARD
from flax import nnx

INIT = jax.nn.initializers.normal(0.1)


def register(config_class: type, model_type: str = "my_model") -> type[CausalLM]:
    """Register a configuration of the guide with the model below; returns the model's class."""

    class MyModel(CausalLM, EasyGenerationMixin, EasyBridgeMixin):
        body_class = MyBody
        WEIGHTS = STANDARD

    register_config(model_type)(config_class)
    return register_module(TaskType.CAUSAL_LM, config=config_class, model_type=model_type)(MyModel)


class MyAttention(nnx.Module):
    """Multi-head attention with rotary positions."""

    def __init__(self, config: Any, dtype, param_dtype, *, rngs: nnx.Rngs):
        d = config.hidden_size
        linear = partial(
            Linear, d, d, dtype=dtype, param_dtype=param_dtype, kernel_init=INIT, rngs=rngs
        )
        self.q_proj = linear(axes=("embed", "heads"))
        self.k_proj = linear(axes=("embed", "heads"))
        self.v_proj = linear(axes=("embed", "heads"))
        self.o_proj = linear(axes=("heads", "embed"))
        self.heads = config.num_attention_heads
        self.mechanism = Mechanism.resolve(config)

    def __call__(self, x, ctx, cache, layer):
        b, s, _ = x.shape
        q, k, v = (
            projection(x, ctx).reshape(b, s, self.heads, -1)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary(q, ctx.rope), apply_rotary(k, ctx.rope)
        told = {"cache": cache, "layer": layer, "ragged": ctx.ragged, "mechanism": self.mechanism}
        out, cache = attend(q, k, v, ctx.mask_info, **told)
        return self.o_proj(out.reshape(b, s, -1), ctx), cache


class MyLayer(nnx.Module):
    """Attention and feed-forward."""

    def __init__(self, config: Any, dtype, param_dtype, *, rngs: nnx.Rngs):
        kinds = {"dtype": dtype, "param_dtype": param_dtype}
        d, f = config.hidden_size, config.intermediate_size
        self.norm = RMSNorm(d, **kinds)
        self.self_attn = MyAttention(config, **kinds, rngs=rngs)
        self.mlp = GatedMLP(d, f, hidden_act="silu", kernel_init=INIT, rngs=rngs, **kinds)

    def __call__(self, x, ctx, cache, layer):
        attended, cache = self.self_attn(self.norm(x), ctx, cache, layer)
        x = x + attended
        return x + self.mlp(self.norm(x), ctx), cache, Report()


class MyBody(EasyDeLBaseModule):
    """Embedding, layers, norm."""

    WEIGHTS = STANDARD

    def __init__(
        self,
        config: Any,
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
            embedding_init=INIT,
            rngs=rngs,
        )
        self.layers = Stack(
            lambda i, rngs: MyLayer(config, dtype, param_dtype, rngs=rngs),
            config.num_hidden_layers,
            scan=config.scan_layers,
            rngs=rngs,
        )
        self.norm = RMSNorm(config.hidden_size, dtype=dtype, param_dtype=param_dtype)

    def __call__(
        self,
        input_ids=None,
        *,
        inputs_embeds=None,
        past_key_values=None,
        output_hidden_states=False,
        **inputs,
    ) -> BaseModelOutput:
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        ctx, cache = layer_context(self.config, x.shape[:2], cache=past_key_values, **inputs)
        x, cache, report, hidden = self.layers(x, ctx, cache, keep_hidden=output_hidden_states)
        return self.output(self.norm(x), ctx, cache, report, hidden)

    def cache_specs(self) -> list[LayerCacheSpec]:
        heads = self.config.num_attention_heads
        spec = LayerCacheSpec(heads, self.config.hidden_size // heads)
        return [spec] * self.config.num_hidden_layers
