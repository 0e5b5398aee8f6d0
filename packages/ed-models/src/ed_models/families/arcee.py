"""Arcee (Arcee AI 2025): Llama with a feed-forward without a gate.

Numbers follow Hugging Face's `modeling_arcee.py`; parameter names are its names.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.mlp import MLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM


@register_config("arcee")
class ArceeConfig(EasyDeLBaseConfig, transformers.ArceeConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "arcee"


class ArceeDecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: ArceeConfig = parts.config
        super().__init__(
            parts,
            self_attn=SelfAttention(parts, bias=config.attention_bias),
            mlp=MLP(parts, bias=config.mlp_bias),
        )


class ArceeModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = ArceeConfig
    layer_class = ArceeDecoderLayer


@register_module(TaskType.CAUSAL_LM, config=ArceeConfig, model_type="arcee")
class ArceeForCausalLM(CausalLM):
    """Arcee with a language-model head."""

    body_class = ArceeModel
