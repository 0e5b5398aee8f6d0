"""LLaVA (Liu et al. 2023): a vision tower such as CLIP's, a projector, and a decoder such as Llama.

- the projector maps hidden states of one or several layers of the tower to the text's hidden size
- each image token of the text is replaced by one projected patch
- with the tower of Pixtral, images of any size are packed patches (Pixtral 12B)

The numbers follow Hugging Face's `modeling_llava.py`.

Legend: t images, c channels, h height, w width, n patches of an image, d hidden.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from jaxtyping import Array, Float

from ed_models.body.image_text import PackedImageTextModel
from ed_models.body.patch_weights import PACKED_WEIGHTS
from ed_models.body.tiles import TILED_MODULES, TILED_NAMES, TwoLayerProjector
from ed_models.modalities.images import ROWS
from ed_models.tasks.conditional import ConditionalLM
from ed_models.weights.rules import NESTED_TIED


@register_config("llava")
class LlavaConfig(EasyDeLBaseConfig, transformers.LlavaConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`.

    The execution fields also apply to `text_config` and `vision_config`.
    """

    model_type = "llava"


class LlavaModel(PackedImageTextModel):
    """Vision tower, projector and decoder."""

    config_class = LlavaConfig
    projector_class = TwoLayerProjector

    def tiles(
        self, pixel_values: Float[Array, "t c h w"], **extra_inputs: Array
    ) -> Float[Array, "t n d"]:
        """Return the projected patches of images."""
        return self.multi_modal_projector(self.select_hidden_states(pixel_values))


@register_module(TaskType.IMAGE_TEXT_TO_TEXT, config=LlavaConfig, model_type="llava")
class LlavaForConditionalGeneration(ConditionalLM):
    """LLaVA with a language-model head."""

    body_class = LlavaModel
    modality = ROWS
    TIED_WEIGHTS = NESTED_TIED
    OTHER_NAMES = TILED_NAMES
    MODULES = TILED_MODULES
    WEIGHTS = PACKED_WEIGHTS
