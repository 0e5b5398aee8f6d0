"""Jais2 (2025): Llama with layer norms and a feed-forward without a gate.

- layer norms
- a feed-forward without a gate

Numbers follow Hugging Face's `modeling_jais2.py`; parameter names are its names.
"""

from __future__ import annotations

from functools import partial

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


@register_config("jais2")
class Jais2Config(EasyDeLBaseConfig, transformers.Jais2Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "jais2"


class Jais2DecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: Jais2Config = parts.config
        super().__init__(
            parts,
            self_attn=SelfAttention(parts, bias=config.attention_bias),
            mlp=MLP(parts, bias=config.mlp_bias),
        )


class Jais2Model(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = Jais2Config
    layer_class = Jais2DecoderLayer

    @staticmethod
    def build_norm(parts):
        return partial(parts.layer_norm, eps=parts.config.layer_norm_eps)


@register_module(TaskType.CAUSAL_LM, config=Jais2Config, model_type="jais2")
class Jais2ForCausalLM(CausalLM):
    """Jais2 with a language-model head."""

    body_class = Jais2Model
