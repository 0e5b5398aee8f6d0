"""EXAONE 4 (LG AI Research 2025): norms after attention and feed-forward, hybrid windows.

- query and key heads are RMS-normed
- where there are windows, only layers with one have rotary positions

Numbers follow Hugging Face's `modeling_exaone4.py`; parameter names are its names.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, QKNorm, Rotary
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import PostNormLayer, get_layer_window
from ed_models.tasks.causal_lm import CausalLM


@register_config("exaone4")
class Exaone4Config(EasyDeLBaseConfig, transformers.Exaone4Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "exaone4"


class Exaone4DecoderLayer(PostNormLayer):
    """Attention and feed-forward, each normed after."""

    def __init__(self, parts: Parts, index: int):
        config: Exaone4Config = parts.config
        window = get_layer_window(config, index)
        everywhere = config.sliding_window is None
        attention = SelfAttention(
            parts,
            norm=QKNorm(parts.norm),
            position=Rotary() if everywhere or window is not None else None,
            mask=MaskRule(window=window),
        )
        super().__init__(parts, self_attn=attention, mlp=GatedMLP(parts))


class Exaone4Model(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = Exaone4Config
    layer_class = Exaone4DecoderLayer


@register_module(TaskType.CAUSAL_LM, config=Exaone4Config, model_type="exaone4")
class Exaone4ForCausalLM(CausalLM):
    """Exaone4 with a language-model head."""

    body_class = Exaone4Model
