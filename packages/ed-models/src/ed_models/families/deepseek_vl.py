"""DeepSeek-VL (DeepSeek 2024): a SigLIP vision tower, a projector, and Llama.

- an image of one size has one feature for each patch

The numbers follow Hugging Face's `modeling_deepseek_vl.py`; parameter names are its names.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.activations import activation
from ed_layers.parts import Parts
from flax import nnx
from jaxtyping import Array, Float

from ed_models.body.tiles import TiledImageTextModel
from ed_models.body.vision import tower_rules
from ed_models.modalities.images import TILES
from ed_models.tasks.conditional import ConditionalLM
from ed_models.weights.rules import NESTED_TIED, STANDARD, renamed


@register_config("deepseek_vl")
class DeepseekVLConfig(EasyDeLBaseConfig, transformers.DeepseekVLConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`.

    The execution fields also apply to `text_config` and `vision_config`.
    """

    model_type = "deepseek_vl"


class DeepseekVLAligner(nnx.Module):
    """Two linear layers from the tower to the decoder."""

    def __init__(self, parts: Parts):
        config: DeepseekVLConfig = parts.config
        v, d = config.vision_config.hidden_size, config.text_config.hidden_size
        self.linear_1 = parts.linear(v, d, axes=(None, "embed"), bias=True)
        self.linear_2 = parts.linear(d, d, axes=("embed", None), bias=True)

    def __call__(self, x: Float[Array, "t n v"]) -> Float[Array, "t n d"]:
        return self.linear_2(activation("gelu")(self.linear_1(x)))


class DeepseekVLModel(TiledImageTextModel):
    """Vision tower, projector and decoder."""

    config_class = DeepseekVLConfig
    projector_class = DeepseekVLAligner


@register_module(TaskType.IMAGE_TEXT_TO_TEXT, config=DeepseekVLConfig, model_type="deepseek_vl")
class DeepseekVLForConditionalGeneration(ConditionalLM):
    """DeepSeek-VL with a language-model head."""

    body_class = DeepseekVLModel
    modality = TILES
    TIED_WEIGHTS = NESTED_TIED
    # Older releases of transformers name the tower inside a module of the tower.
    OTHER_NAMES = {"vision_model.vision_model": "vision_model"}
    WEIGHTS = (
        *tower_rules("model.vision_tower", "model.vision_model"),
        *renamed(
            {
                "model.multi_modal_projector.linear_1": "model.aligner.linear1",
                "model.multi_modal_projector.linear_2": "model.aligner.linear2",
            },
            *STANDARD,
        ),
    )
