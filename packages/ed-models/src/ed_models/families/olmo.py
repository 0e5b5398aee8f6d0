"""OLMo (Groeneveld et al. 2024): Llama with layer norms that have no parameters.

- norms subtract the mean and have neither weight nor bias
- projections may be clipped (`clip_qkv`)

Numbers follow Hugging Face's `modeling_olmo.py`; parameter names are its names.
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
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM


@register_config("olmo")
class OlmoConfig(EasyDeLBaseConfig, transformers.OlmoConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "olmo"


class OlmoDecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: OlmoConfig = parts.config
        attention = SelfAttention(
            parts, bias=config.attention_bias, norm=QKNorm(clip=config.clip_qkv)
        )
        super().__init__(parts, self_attn=attention, mlp=GatedMLP(parts))


class OlmoModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = OlmoConfig
    layer_class = OlmoDecoderLayer

    @staticmethod
    def build_norm(parts):
        return partial(parts.layer_norm, eps=1e-5, weight=False, bias=False)


@register_module(TaskType.CAUSAL_LM, config=OlmoConfig, model_type="olmo")
class OlmoForCausalLM(CausalLM):
    """Olmo with a language-model head."""

    body_class = OlmoModel
