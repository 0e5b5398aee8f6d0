"""GLM-4 0414 (Zhipu 2025): GLM with norms before and after.

- attention and feed-forward are each normed before and after
- rotary pairs are neighbours, half of each head turns
- biases on queries, keys and values; one tensor for gate and up

Numbers follow Hugging Face's `modeling_glm4.py`; parameter names are its names.
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
from ed_models.body.layers import SandwichLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, fused, renamed


@register_config("glm4")
class Glm4Config(EasyDeLBaseConfig, transformers.Glm4Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "glm4"


class Glm4DecoderLayer(SandwichLayer):
    """Attention and feed-forward, each normed before and after."""

    def __init__(self, parts: Parts, index: int):
        config: Glm4Config = parts.config
        attention = SelfAttention(
            parts, bias=config.attention_bias, out_bias=False, position=Rotary(interleaved=True)
        )
        super().__init__(parts, self_attn=attention, mlp=GatedMLP(parts))


class Glm4Model(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = Glm4Config
    layer_class = Glm4DecoderLayer


@register_module(TaskType.CAUSAL_LM, config=Glm4Config, model_type="glm4")
class Glm4ForCausalLM(CausalLM):
    """Glm4 with a language-model head."""

    body_class = Glm4Model

    WEIGHTS = renamed(
        {
            "post_attention_layernorm": "post_self_attn_layernorm",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm",
        },
        *fused(("gate_proj", "up_proj"), "gate_up_proj"),
        *STANDARD,
    )
