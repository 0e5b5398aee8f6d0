"""Aya Vision (Cohere 2025): a SigLIP vision tower over tiles, a gated projector, and Cohere 2.

- an image is a grid of tiles and the whole image in the size of a tile
- squares of `downsample_factor` x `downsample_factor` patches become one feature

The numbers follow Hugging Face's `modeling_aya_vision.py`.

Legend: t tiles, c channels, h height, w width, n patches of a tile, m features of a tile, v and d
hidden size of the tower and of the text.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.parts import Parts
from flax import nnx
from jaxtyping import Array, Float

from ed_models.body.tiles import (
    TILED_MODULES,
    TILED_NAMES,
    TILED_WEIGHTS,
    TiledImageTextModel,
    joined_squares,
)
from ed_models.modalities.images import TILES
from ed_models.tasks.conditional import ConditionalLM
from ed_models.weights.rules import NESTED_TIED


@register_config("aya_vision")
class AyaVisionConfig(EasyDeLBaseConfig, transformers.AyaVisionConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`.

    The execution fields also apply to `text_config` and `vision_config`.
    """

    model_type = "aya_vision"


class AyaVisionProjector(nnx.Module):
    """Joins squares of patches; a norm and two linear layers with a gate between them."""

    def __init__(self, parts: Parts):
        config: AyaVisionConfig = parts.config
        d = config.text_config.hidden_size
        inner: int = getattr(config, "alignment_intermediate_size", d)
        self.side = config.downsample_factor
        inputs = config.vision_config.hidden_size * self.side**2
        self.layernorm = parts.layer_norm(inputs, eps=config.adapter_layer_norm_eps)
        self.linear_1 = parts.linear(inputs, inner, axes=(None, "embed"), bias=True)
        self.linear_2 = parts.linear(inner // 2, d, axes=("embed", None), bias=True)

    def __call__(self, x: Float[Array, "t n v"]) -> Float[Array, "t m d"]:
        x = self.linear_1(self.layernorm(joined_squares(x, self.side)))
        value, gate = jnp.split(x, 2, axis=-1)
        return self.linear_2(jax.nn.silu(gate) * value)


class AyaVisionModel(TiledImageTextModel):
    """Vision tower, projector and decoder."""

    config_class = AyaVisionConfig
    projector_class = AyaVisionProjector

    def tiles(
        self, pixel_values: Float[Array, "t c h w"], **extra_inputs: Array
    ) -> Float[Array, "t n d"]:
        """Return the features of tiles."""
        return self.multi_modal_projector(self.select_hidden_states(pixel_values))


@register_module(TaskType.IMAGE_TEXT_TO_TEXT, config=AyaVisionConfig, model_type="aya_vision")
class AyaVisionForConditionalGeneration(ConditionalLM):
    """Aya Vision with a language-model head, whose logits are not scaled."""

    body_class = AyaVisionModel
    modality = TILES
    TIED_WEIGHTS = NESTED_TIED
    OTHER_NAMES = TILED_NAMES
    MODULES = TILED_MODULES
    WEIGHTS = TILED_WEIGHTS
