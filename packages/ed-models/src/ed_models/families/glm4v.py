"""GLM-4V (Zhipu 2025, GLM-4.1V and 4.6V Flash): a vision tower over packed patches, and GLM-4 with
M-RoPE.

- patches have learned positions, resized to the image, in addition to row and column
- a block of patches becomes one feature by a convolution, and a gated layer follows
- the language model has norms before and after attention and feed-forward

Numbers follow Hugging Face's `modeling_glm4v.py`; parameter names are its names.
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
from transformers.models.glm4v.configuration_glm4v import Glm4vTextConfig as _Text
from transformers.models.glm4v.configuration_glm4v import Glm4vVisionConfig as _Vision

from ed_models.body.decoder import Decoder
from ed_models.body.glm_vision import GLM_TEXT, glm_tower, glm_weights
from ed_models.body.image_text import PatchedImageTextModel
from ed_models.body.layers import SandwichLayer
from ed_models.body.patch_tower import PatchTower
from ed_models.modalities.images import PATCHES
from ed_models.tasks.causal_lm import CausalLM
from ed_models.tasks.conditional import ConditionalLM
from ed_models.weights.rules import NESTED_TIED


class Glm4vVisionConfig(EasyDeLBaseConfig, _Vision):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "glm4v_vision"


@register_config("glm4v_text")
class Glm4vTextConfig(EasyDeLBaseConfig, _Text):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "glm4v_text"


@register_config("glm4v")
class Glm4vConfig(EasyDeLBaseConfig, transformers.Glm4vConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "glm4v"
    nested_configs = {"vision_config": Glm4vVisionConfig}


@register_config("glm46v")
class Glm46VConfig(EasyDeLBaseConfig, transformers.Glm46VConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "glm46v"
    nested_configs = {"vision_config": Glm4vVisionConfig}


class Glm4vTextDecoderLayer(SandwichLayer):
    """Attention and feed-forward, each normed before and after."""

    def __init__(self, parts: Parts, index: int):
        attention = SelfAttention(
            parts, bias=True, out_bias=False, position=Rotary(interleaved=True)
        )
        super().__init__(parts, self_attn=attention, mlp=GatedMLP(parts))


class Glm4vTextModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = Glm4vTextConfig
    layer_class = Glm4vTextDecoderLayer


@register_module(TaskType.CAUSAL_LM, config=Glm4vTextConfig, model_type="glm4v_text")
class Glm4vTextForCausalLM(CausalLM):
    """The language model of GLM-4V."""

    body_class = Glm4vTextModel
    WEIGHTS = GLM_TEXT


class Glm4vModel(PatchedImageTextModel):
    """Vision tower and decoder."""

    config_class = Glm4vConfig

    def tower(self, parts: Parts) -> PatchTower:
        return glm_tower(parts)


class Glm46VModel(Glm4vModel):
    """Vision tower and decoder of GLM-4.6V."""

    config_class = Glm46VConfig


@register_module(TaskType.IMAGE_TEXT_TO_TEXT, config=Glm4vConfig, model_type="glm4v")
class Glm4vForConditionalGeneration(ConditionalLM):
    """GLM-4V with a language-model head."""

    body_class = Glm4vModel
    modality = PATCHES
    TIED_WEIGHTS = NESTED_TIED
    WEIGHTS = glm_weights(GLM_TEXT)


@register_module(TaskType.IMAGE_TEXT_TO_TEXT, config=Glm46VConfig, model_type="glm46v")
class Glm46VForConditionalGeneration(ConditionalLM):
    """GLM-4.6V with a language-model head."""

    body_class = Glm46VModel
    modality = PATCHES
    TIED_WEIGHTS = NESTED_TIED
    WEIGHTS = glm_weights(GLM_TEXT)
