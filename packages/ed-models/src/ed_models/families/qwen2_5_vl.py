"""Qwen2.5-VL (Bai et al. 2025): Qwen2-VL with windows in most layers of the vision tower.

- patches attend within windows of their image, and in some layers to the whole image
- RMS norms and gated feed-forward layers in the tower

Numbers follow Hugging Face's `modeling_qwen2_5_vl.py`; parameter names are its names.
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
from ed_models.body.image_text import PatchedImageTextModel
from ed_models.body.layers import DecoderLayer, get_layer_window
from ed_models.body.patch_tower import PatchTower, windowed_tower
from ed_models.body.patch_weights import MERGER, PATCH_MODULES, PATCH_NAMES, patch_weights
from ed_models.modalities.videos import TIMED_FRAMES
from ed_models.tasks.causal_lm import CausalLM
from ed_models.tasks.conditional import ConditionalLM
from ed_models.weights.rules import NESTED_TIED


class Qwen2_5_VLVisionConfig(EasyDeLBaseConfig, transformers.Qwen2_5_VLVisionConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "qwen2_5_vl_vision"


@register_config("qwen2_5_vl_text")
class Qwen2_5_VLTextConfig(EasyDeLBaseConfig, transformers.Qwen2_5_VLTextConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "qwen2_5_vl_text"


@register_config("qwen2_5_vl")
class Qwen2_5_VLConfig(EasyDeLBaseConfig, transformers.Qwen2_5_VLConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "qwen2_5_vl"
    nested_configs = {"vision_config": Qwen2_5_VLVisionConfig}


class Qwen2_5_VLTextDecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: Qwen2_5_VLTextConfig = parts.config
        attention = SelfAttention(
            parts, bias=True, out_bias=False, mask=MaskRule(window=get_layer_window(config, index))
        )
        super().__init__(parts, self_attn=attention, mlp=GatedMLP(parts))


class Qwen2_5_VLTextModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = Qwen2_5_VLTextConfig
    layer_class = Qwen2_5_VLTextDecoderLayer


@register_module(TaskType.CAUSAL_LM, config=Qwen2_5_VLTextConfig, model_type="qwen2_5_vl_text")
class Qwen2_5_VLTextForCausalLM(CausalLM):
    """The language model of Qwen2.5-VL."""

    body_class = Qwen2_5_VLTextModel


class Qwen2_5_VLModel(PatchedImageTextModel):
    """Vision tower and decoder."""

    config_class = Qwen2_5_VLConfig

    def tower(self, parts: Parts) -> PatchTower:
        return windowed_tower(parts)


@register_module(TaskType.IMAGE_TEXT_TO_TEXT, config=Qwen2_5_VLConfig, model_type="qwen2_5_vl")
class Qwen2_5_VLForConditionalGeneration(ConditionalLM):
    """Qwen2.5-VL with a language-model head."""

    body_class = Qwen2_5_VLModel
    modality = TIMED_FRAMES
    TIED_WEIGHTS = NESTED_TIED
    OTHER_NAMES = PATCH_NAMES
    MODULES = PATCH_MODULES
    WEIGHTS = patch_weights(MERGER)
