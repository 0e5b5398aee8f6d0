"""OLMo 2 (OLMo Team 2024): Llama with norms after attention and feed-forward.

- attention and feed-forward read the stream without a norm; their outputs are normed
- queries and keys are RMS-normed over all heads together
- norms scale in float32

Numbers follow Hugging Face's `modeling_olmo2.py`; parameter names are its names.
"""

from __future__ import annotations

from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import QKNorm
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import PostNormLayer
from ed_models.tasks.causal_lm import CausalLM


@register_config("olmo2")
class Olmo2Config(EasyDeLBaseConfig, transformers.Olmo2Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "olmo2"


class Olmo2DecoderLayer(PostNormLayer):
    """Attention and feed-forward, each normed after."""

    def __init__(self, parts: Parts, index: int):
        config: Olmo2Config = parts.config
        attention = SelfAttention(
            parts, bias=config.attention_bias, norm=QKNorm(parts.own_norm, heads="all")
        )
        super().__init__(parts, self_attn=attention, mlp=GatedMLP(parts))


class Olmo2Model(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = Olmo2Config
    layer_class = Olmo2DecoderLayer

    @staticmethod
    def build_norm(parts):
        return partial(parts.norm, scale_first=True)


@register_module(TaskType.CAUSAL_LM, config=Olmo2Config, model_type="olmo2")
class Olmo2ForCausalLM(CausalLM):
    """Olmo2 with a language-model head."""

    body_class = Olmo2Model
