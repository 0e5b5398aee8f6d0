"""Ministral 3 (Mistral AI 2025): Mistral with queries that grow with their position.

- queries are scaled by `1 + llama_4_scaling_beta * log(1 + position // original length)`
- YaRN positions

Numbers follow Hugging Face's `modeling_ministral3.py`; parameter names are its names.
"""

from __future__ import annotations

import jax.numpy as jnp
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM


@register_config("ministral3")
class Ministral3Config(EasyDeLBaseConfig, transformers.Ministral3Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "ministral3"


class Ministral3Attention(SelfAttention):
    """Self-attention whose queries are scaled by their positions (Llama 4's temperature)."""

    def __init__(self, parts: Parts):
        super().__init__(parts, mask=MaskRule(window=parts.config.sliding_window))
        rope = parts.config.rope_parameters
        self.beta = rope["llama_4_scaling_beta"]
        self.trained = rope["original_max_position_embeddings"]

    def project_qkv(self, x, ctx):
        q, k, v = super().project_qkv(x, ctx)
        steps = jnp.floor(ctx.position_ids / self.trained)
        scale = 1 + self.beta * jnp.log1p(steps)
        return q * scale[:, :, None, None].astype(q.dtype), k, v


class Ministral3DecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        super().__init__(parts, self_attn=Ministral3Attention(parts), mlp=GatedMLP(parts))


class Ministral3Model(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = Ministral3Config
    layer_class = Ministral3DecoderLayer


@register_module(TaskType.CAUSAL_LM, config=Ministral3Config, model_type="ministral3")
class Ministral3ForCausalLM(CausalLM):
    """Ministral3 with a language-model head."""

    body_class = Ministral3Model
