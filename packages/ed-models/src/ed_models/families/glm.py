"""GLM-4 9B (Zhipu 2024): Llama with half-turned heads.

- rotary pairs are neighbours, half of each head turns
- biases on queries, keys and values; one tensor for gate and up

Numbers follow Hugging Face's `modeling_glm.py`; parameter names are its names.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import Rotary
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, fused


@register_config("glm")
class GlmConfig(EasyDeLBaseConfig, transformers.GlmConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "glm"


class GlmDecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: GlmConfig = parts.config
        attention = SelfAttention(
            parts, bias=config.attention_bias, out_bias=False, position=Rotary(interleaved=True)
        )
        super().__init__(parts, self_attn=attention, mlp=GatedMLP(parts))


class GlmModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = GlmConfig
    layer_class = GlmDecoderLayer


@register_module(TaskType.CAUSAL_LM, config=GlmConfig, model_type="glm")
class GlmForCausalLM(CausalLM):
    """Glm with a language-model head."""

    body_class = GlmModel

    WEIGHTS = (*fused(("gate_proj", "up_proj"), "gate_up_proj"), *STANDARD)
