"""VipLLaVA (Cai et al. 2024): LLaVA whose projector reads several layers of the tower.

- the hidden states of the layers of a patch are one vector, which is normed
- the class token of the tower has no feature

The numbers follow Hugging Face's `modeling_vipllava.py`.

Legend: t images, c channels, h height, w width, n patches of an image, f joined hidden states of a
patch, v and d hidden size of the tower and of the text.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.parts import Parts
from jaxtyping import Array, Float

from ed_models.body.tiles import (
    TILED_MODULES,
    TILED_NAMES,
    TILED_WEIGHTS,
    TiledImageTextModel,
    TwoLayerProjector,
)
from ed_models.modalities.images import TILES
from ed_models.tasks.conditional import ConditionalLM
from ed_models.weights.rules import NESTED_TIED


@register_config("vipllava")
class VipLlavaConfig(EasyDeLBaseConfig, transformers.VipLlavaConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`.

    The execution fields also apply to `text_config` and `vision_config`.
    """

    model_type = "vipllava"


class VipLlavaProjector(TwoLayerProjector):
    """A norm and two linear layers."""

    def __init__(self, parts: Parts):
        super().__init__(parts)
        eps: float = parts.config.projector_layernorm_eps
        self.projector_layernorm = parts.layer_norm(self.inputs, eps=eps)

    def __call__(self, x: Float[Array, "t n f"]) -> Float[Array, "t n d"]:
        return super().__call__(self.projector_layernorm(x))


class VipLlavaModel(TiledImageTextModel):
    """Vision tower, projector and decoder."""

    config_class = VipLlavaConfig
    projector_class = VipLlavaProjector

    def tiles(
        self, pixel_values: Float[Array, "t c h w"], **extra_inputs: Array
    ) -> Float[Array, "t n d"]:
        """Return the projected patches of images."""
        return self.multi_modal_projector(self.select_hidden_states(pixel_values)[:, 1:])


@register_module(TaskType.IMAGE_TEXT_TO_TEXT, config=VipLlavaConfig, model_type="vipllava")
class VipLlavaForConditionalGeneration(ConditionalLM):
    """VipLLaVA with a language-model head."""

    body_class = VipLlavaModel
    modality = TILES
    TIED_WEIGHTS = NESTED_TIED
    OTHER_NAMES = TILED_NAMES
    MODULES = TILED_MODULES
    WEIGHTS = TILED_WEIGHTS
