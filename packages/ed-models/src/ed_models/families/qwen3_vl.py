"""Qwen3-VL (Qwen Team 2025): a vision tower over packed patches, and Qwen3 with M-RoPE.

- patches have learned positions, resized to the image, in addition to row and column
- features of several layers of the tower are added to the outputs of the first text layers
- the axes of rotary positions alternate

Numbers follow Hugging Face's `modeling_qwen3_vl.py`; parameter names are its names.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import QKNorm
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.context import alternate_axes
from ed_models.body.decoder import Decoder
from ed_models.body.image_text import PatchedImageTextModel
from ed_models.body.layers import AddingLayer
from ed_models.body.patch_tower import PatchTower, deep_tower
from ed_models.body.patch_weights import NESTED, NESTED_NAMES, patch_weights
from ed_models.modalities.videos import FRAMES
from ed_models.tasks.causal_lm import CausalLM
from ed_models.tasks.conditional import ConditionalLM
from ed_models.weights.rules import NESTED_TIED


class Qwen3VLVisionConfig(EasyDeLBaseConfig, transformers.Qwen3VLVisionConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "qwen3_vl_vision"


@register_config("qwen3_vl_text")
class Qwen3VLTextConfig(EasyDeLBaseConfig, transformers.Qwen3VLTextConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "qwen3_vl_text"


@register_config("qwen3_vl")
class Qwen3VLConfig(EasyDeLBaseConfig, transformers.Qwen3VLConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "qwen3_vl"
    nested_configs = {"vision_config": Qwen3VLVisionConfig}


class Qwen3VLTextDecoderLayer(AddingLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        attention = SelfAttention(parts, bias=parts.config.attention_bias, norm=QKNorm(parts.norm))
        super().__init__(parts, self_attn=attention, mlp=GatedMLP(parts))


class Qwen3VLTextModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = Qwen3VLTextConfig
    layer_class = Qwen3VLTextDecoderLayer

    def rope_settings(self):
        return alternate_axes(super().rope_settings(), (24, 20, 20))


@register_module(TaskType.CAUSAL_LM, config=Qwen3VLTextConfig, model_type="qwen3_vl_text")
class Qwen3VLTextForCausalLM(CausalLM):
    """The language model of Qwen3-VL."""

    body_class = Qwen3VLTextModel


class Qwen3VLModel(PatchedImageTextModel):
    """Vision tower and decoder."""

    config_class = Qwen3VLConfig

    def tower(self, parts: Parts) -> PatchTower:
        return deep_tower(parts)


@register_module(TaskType.IMAGE_TEXT_TO_TEXT, config=Qwen3VLConfig, model_type="qwen3_vl")
class Qwen3VLForConditionalGeneration(ConditionalLM):
    """Qwen3-VL with a language-model head."""

    body_class = Qwen3VLModel
    modality = FRAMES
    TIED_WEIGHTS = NESTED_TIED
    WEIGHTS = patch_weights(NESTED_NAMES, stored=NESTED)
