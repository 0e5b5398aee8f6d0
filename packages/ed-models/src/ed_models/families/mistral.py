"""Mistral (Jiang et al. 2023): Llama with a sliding window.

- all layers see the last `sliding_window` tokens, or all tokens if the field is null
- no biases; `head_dim` is independent of the hidden size

Numbers follow Hugging Face's `modeling_mistral.py`; parameter names are its names.
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
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM


@register_config("mistral")
class MistralConfig(EasyDeLBaseConfig, transformers.MistralConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "mistral"


class MistralDecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: MistralConfig = parts.config
        super().__init__(
            parts,
            self_attn=SelfAttention(parts, mask=MaskRule(window=config.sliding_window)),
            mlp=GatedMLP(parts),
        )


class MistralModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = MistralConfig
    layer_class = MistralDecoderLayer


@register_module(TaskType.CAUSAL_LM, config=MistralConfig, model_type="mistral")
class MistralForCausalLM(CausalLM):
    """Mistral with a language-model head."""

    body_class = MistralModel
