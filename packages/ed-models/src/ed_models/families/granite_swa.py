"""GraniteSWA (IBM 2026): Granite with a window in layers of type `sliding_attention` and a base
frequency of the rotary positions for each layer; 0 is none.

- a factor on what a layer adds to the stream
- a window in layers of type `sliding_attention`
- a base frequency of the rotary positions for each layer; 0 is none
- a trained logit of each head in the softmax (a sink)
- a factor on the embeddings
- a factor on the logits

Numbers follow Hugging Face's `modeling_granite_swa.py`; parameter names are its names.
"""

from __future__ import annotations

from dataclasses import replace

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, Rotary, ScoreRule
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.context import build_theta_settings
from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer, get_layer_window
from ed_models.tasks.causal_lm import CausalLM


@register_config("granite_swa")
class GraniteSWAConfig(EasyDeLBaseConfig, transformers.GraniteSWAConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "granite_swa"


class GraniteSWADecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: GraniteSWAConfig = parts.config
        super().__init__(
            parts,
            self_attn=SelfAttention(
                parts,
                bias=config.attention_bias,
                mask=MaskRule(window=get_layer_window(config, index)),
                position=Rotary(str(config.layer_rope_theta[index]))
                if config.layer_rope_theta[index]
                else None,
                scores=ScoreRule(scale=config.attention_multiplier, sinks=True),
            ),
            mlp=GatedMLP(parts, bias=config.mlp_bias),
            factor=config.residual_multiplier,
        )


class GraniteSWAModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = GraniteSWAConfig
    layer_class = GraniteSWADecoderLayer

    @staticmethod
    def layer_kinds(config):
        return list(zip(config.layer_types, config.layer_rope_theta, strict=True))

    def enter(self, x, ctx):
        return x * self.config.embedding_multiplier

    def rope_settings(self):
        return build_theta_settings(self.config, self.config.layer_rope_theta)


@register_module(TaskType.CAUSAL_LM, config=GraniteSWAConfig, model_type="granite_swa")
class GraniteSWAForCausalLM(CausalLM):
    """GraniteSWA with a language-model head."""

    body_class = GraniteSWAModel

    def head(self):
        return replace(super().head(), scale=1 / self.config.logits_scaling)
