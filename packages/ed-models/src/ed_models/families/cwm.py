"""Cwm: Llama with a window in layers of type `sliding_attention`.

Numbers follow Hugging Face's `modeling_cwm.py`; parameter names are its names.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer, get_layer_window
from ed_models.tasks.causal_lm import CausalLM


@register_config("cwm")
class CwmConfig(EasyDeLBaseConfig, transformers.CwmConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "cwm"


class CwmDecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: CwmConfig = parts.config
        super().__init__(
            parts,
            self_attn=SelfAttention(parts, mask=MaskRule(window=get_layer_window(config, index))),
            mlp=GatedMLP(parts, bias=config.mlp_bias),
        )


class CwmModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = CwmConfig
    layer_class = CwmDecoderLayer


@register_module(TaskType.CAUSAL_LM, config=CwmConfig, model_type="cwm")
class CwmForCausalLM(CausalLM):
    """Cwm with a language-model head."""

    body_class = CwmModel
