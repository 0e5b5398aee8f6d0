"""Qwen2-VL (Wang et al. 2024): a vision tower over packed patches, and Qwen2 with M-RoPE.

- images keep their size: attention connects the patches of one image, with positions by row and
  column; four neighboring patches become one feature
- text has rotary positions along time, height and width

Numbers follow Hugging Face's `modeling_qwen2_vl.py`; parameter names are its names.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule
from ed_layers.mlp import MLP, GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.image_text import PatchedImageTextModel
from ed_models.body.layers import DecoderLayer, get_layer_window
from ed_models.body.patch_tower import PatchLayer, PatchTower
from ed_models.body.patch_weights import MERGER, PATCH_MODULES, PATCH_NAMES, patch_weights
from ed_models.modalities.videos import TIMED_FRAMES
from ed_models.tasks.causal_lm import CausalLM
from ed_models.tasks.conditional import ConditionalLM
from ed_models.weights.rules import NESTED_TIED


class Qwen2VLVisionConfig(EasyDeLBaseConfig, transformers.Qwen2VLVisionConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "qwen2_vl_vision"


@register_config("qwen2_vl_text")
class Qwen2VLTextConfig(EasyDeLBaseConfig, transformers.Qwen2VLTextConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "qwen2_vl_text"


@register_config("qwen2_vl")
class Qwen2VLConfig(EasyDeLBaseConfig, transformers.Qwen2VLConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "qwen2_vl"
    nested_configs = {"vision_config": Qwen2VLVisionConfig}


class Qwen2VLTextDecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: Qwen2VLTextConfig = parts.config
        attention = SelfAttention(
            parts, bias=True, out_bias=False, mask=MaskRule(window=get_layer_window(config, index))
        )
        super().__init__(parts, self_attn=attention, mlp=GatedMLP(parts))


class Qwen2VLTextModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = Qwen2VLTextConfig
    layer_class = Qwen2VLTextDecoderLayer


@register_module(TaskType.CAUSAL_LM, config=Qwen2VLTextConfig, model_type="qwen2_vl_text")
class Qwen2VLTextForCausalLM(CausalLM):
    """The language model of Qwen2-VL."""

    body_class = Qwen2VLTextModel


class Qwen2VLVisionBlock(PatchLayer):
    """Attention and feed-forward without a gate, each normed before."""

    def __init__(self, parts: Parts, index: int):
        config: Qwen2VLVisionConfig = parts.config
        super().__init__(parts, mlp=MLP(parts, int(config.embed_dim * config.mlp_ratio)))


class Qwen2VLModel(PatchedImageTextModel):
    """Vision tower and decoder."""

    config_class = Qwen2VLConfig

    def tower(self, parts: Parts) -> PatchTower:
        config: Qwen2VLVisionConfig = parts.config
        # The configuration's hidden_size is that of the features.
        vision_config = config.replace(hidden_size=config.embed_dim)
        parts = replace(
            parts, config=vision_config, norm_of_family=partial(parts.layer_norm, eps=1e-6)
        )
        return PatchTower(
            parts, Qwen2VLVisionBlock, depth=config.depth, features=config.hidden_size
        )


@register_module(TaskType.IMAGE_TEXT_TO_TEXT, config=Qwen2VLConfig, model_type="qwen2_vl")
class Qwen2VLForConditionalGeneration(ConditionalLM):
    """Qwen2-VL with a language-model head."""

    body_class = Qwen2VLModel
    modality = TIMED_FRAMES
    TIED_WEIGHTS = NESTED_TIED
    OTHER_NAMES = PATCH_NAMES
    MODULES = PATCH_MODULES
    WEIGHTS = patch_weights({**MERGER, "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"})
