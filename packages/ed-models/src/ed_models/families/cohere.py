"""Cohere Command R (Cohere 2024): attention and feed-forward side by side.

- one layer norm without bias feeds both
- rotary pairs are neighbours
- queries and keys may be normed, each head with separate weights (`use_qk_norm`)
- logits are multiplied by `logit_scale`; head tied to the embedding

Numbers follow Hugging Face's `modeling_cohere.py`; parameter names are its names.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import QKNorm, Rotary
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import ParallelLayer
from ed_models.tasks.causal_lm import CausalLM


@register_config("cohere")
class CohereConfig(EasyDeLBaseConfig, transformers.CohereConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "cohere"


class CohereDecoderLayer(ParallelLayer):
    """Attention and feed-forward side by side behind one norm."""

    def __init__(self, parts: Parts, index: int):
        config: CohereConfig = parts.config
        attention = SelfAttention(
            parts,
            bias=config.attention_bias,
            norm=QKNorm(parts.own_norm if config.use_qk_norm else None, heads="own"),
            position=Rotary(interleaved=True),
        )
        super().__init__(parts, self_attn=attention, mlp=GatedMLP(parts))


class CohereModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = CohereConfig
    layer_class = CohereDecoderLayer

    @staticmethod
    def build_norm(parts):
        return partial(parts.layer_norm, eps=parts.config.layer_norm_eps, bias=False)


@register_module(TaskType.CAUSAL_LM, config=CohereConfig, model_type="cohere")
class CohereForCausalLM(CausalLM):
    """Cohere with a language-model head."""

    body_class = CohereModel

    def head(self):
        return replace(super().head(), scale=self.config.logit_scale)
