"""Apertus (Swiss AI 2025): an activation with learned parameters.

- a feed-forward without a gate, whose activation is xIELU (Huang & Schlag 2024)
- queries and keys are normed

Numbers follow Hugging Face's `modeling_apertus.py`; parameter names are its names.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import QKNorm
from ed_layers.mlp import MLP
from ed_layers.parts import Parts
from flax import nnx

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, renamed


@register_config("apertus")
class ApertusConfig(EasyDeLBaseConfig, transformers.ApertusConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "apertus"


class Constant(nnx.Variable):
    """A number that checkpoints hold, and that nothing changes."""


class XIELU(nnx.Module):
    """xIELU: a parabola above zero, an exponential below; two slopes are learned."""

    def __init__(self, parts: Parts):
        dtype = parts.param_dtype
        above, below = 0.8, 0.3  # slopes; half of the lower one is `beta`
        self.alpha_p = nnx.Param(jnp.log(jnp.expm1(jnp.full((1,), above, dtype))), axes=(None,))
        self.alpha_n = nnx.Param(jnp.log(jnp.expm1(jnp.full((1,), below, dtype))), axes=(None,))
        self.beta = Constant(jnp.asarray(0.5, dtype), axes=())
        self.eps = Constant(jnp.asarray(-1e-6, dtype), axes=())

    def __call__(self, x: jax.Array) -> jax.Array:
        beta, eps = (y.get_value().astype(x.dtype) for y in (self.beta, self.eps))
        alpha_p, alpha_n = (
            jax.nn.softplus(y.get_value()).astype(x.dtype) for y in (self.alpha_p, self.alpha_n)
        )
        below = (jnp.expm1(jnp.minimum(x, eps)) - x) * (beta + alpha_n)
        return jnp.where(x > 0, alpha_p * x * x, below) + beta * x


class ApertusDecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: ApertusConfig = parts.config
        act = XIELU(parts) if config.hidden_act == "xielu" else None
        super().__init__(
            parts,
            self_attn=SelfAttention(parts, bias=config.attention_bias, norm=QKNorm(parts.norm)),
            mlp=MLP(parts, bias=False, act=act),
        )


class ApertusModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = ApertusConfig
    layer_class = ApertusDecoderLayer


@register_module(TaskType.CAUSAL_LM, config=ApertusConfig, model_type="apertus")
class ApertusForCausalLM(CausalLM):
    """Apertus with a language-model head."""

    body_class = ApertusModel

    WEIGHTS = renamed(
        {
            "input_layernorm": "attention_layernorm",
            "post_attention_layernorm": "feedforward_layernorm",
        },
        *STANDARD,
    )
