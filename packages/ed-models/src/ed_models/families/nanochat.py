"""nanochat (Karpathy 2025): no weights in norms, squared ReLU without a gate.

- the embedding is normed before the first layer
- rotary positions turn the other way; queries and keys are normed after them
- logits have a soft cap

Numbers follow Hugging Face's `modeling_nanochat.py`; parameter names are its names.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import QKNorm
from ed_layers.context import ALL_LAYERS
from ed_layers.mlp import MLP
from ed_layers.parts import Parts
from flax import nnx

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, renamed


@register_config("nanochat")
class NanoChatConfig(EasyDeLBaseConfig, transformers.NanoChatConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "nanochat"


class NanoChatAttention(SelfAttention):
    """Attention whose rotary positions turn the other way."""

    def __call__(self, x, ctx, cache, layer):
        cos, sin = ctx.rope[ALL_LAYERS]
        return super().__call__(x, replace(ctx, rope={ALL_LAYERS: (cos, -sin)}), cache, layer)


class NanoChatDecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: NanoChatConfig = parts.config
        attention = NanoChatAttention(
            parts, bias=config.attention_bias, norm=QKNorm(parts.own_norm, last=True)
        )
        super().__init__(parts, self_attn=attention, mlp=MLP(parts, bias=False))


class NanoChatModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = NanoChatConfig
    norm: nnx.Module
    layer_class = NanoChatDecoderLayer

    @staticmethod
    def build_norm(parts):
        return partial(parts.norm, weight=False)

    def enter(self, x, ctx):
        return self.norm(x)


@register_module(TaskType.CAUSAL_LM, config=NanoChatConfig, model_type="nanochat")
class NanoChatForCausalLM(CausalLM):
    """NanoChat with a language-model head."""

    body_class = NanoChatModel

    WEIGHTS = renamed({"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}, *STANDARD)

    def head(self):
        return replace(super().head(), soft_cap=self.config.final_logit_softcapping)
