"""ERNIE 4.5 (Baidu 2025): Llama with neighbours as rotary pairs.

- one switch for all biases (`use_bias`); head tied to the embedding

Numbers follow Hugging Face's `modeling_ernie4_5.py`; parameter names are its names.
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


@register_config("ernie4_5")
class Ernie4_5Config(EasyDeLBaseConfig, transformers.Ernie4_5Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "ernie4_5"


class Ernie4_5DecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: Ernie4_5Config = parts.config
        super().__init__(
            parts,
            self_attn=SelfAttention(parts, bias=config.use_bias, position=Rotary(interleaved=True)),
            mlp=GatedMLP(parts, bias=config.use_bias),
        )


class Ernie4_5Model(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = Ernie4_5Config
    layer_class = Ernie4_5DecoderLayer


@register_module(TaskType.CAUSAL_LM, config=Ernie4_5Config, model_type="ernie4_5")
class Ernie4_5ForCausalLM(CausalLM):
    """Ernie4_5 with a language-model head."""

    body_class = Ernie4_5Model
