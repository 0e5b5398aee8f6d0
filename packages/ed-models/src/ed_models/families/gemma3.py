"""Gemma 3 (Gemma Team 2025): a SigLIP vision tower, a projector that averages patches, and the text
model of `gemma3_text`.

- the projector averages squares of patches, so that each image has `mm_tokens_per_image` features
- the tokens of an image attend to each other in both directions

The numbers follow Hugging Face's `modeling_gemma3.py`.

Legend: t images, n patches of an image, m features of an image, v and d hidden
size of the tower and of the text.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.registry import register_config, register_module
from ed_layers.parts import Parts
from flax import nnx
from jaxtyping import Array, Float

from ed_models.body.tiles import TILED_MODULES, TILED_NAMES, TILED_WEIGHTS, TiledImageTextModel
from ed_models.modalities.images import TILES
from ed_models.tasks.conditional import ConditionalLM
from ed_models.weights.rules import NESTED_TIED


@register_config("gemma3")
class Gemma3MultimodalConfig(EasyDeLBaseConfig, transformers.Gemma3Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`.

    The execution fields also apply to `text_config` and `vision_config`.
    """

    model_type = "gemma3"


class Gemma3Projector(nnx.Module):
    """Averages squares of patches, and projects the normed averages."""

    def __init__(self, parts: Parts):
        config: Gemma3MultimodalConfig = parts.config
        vision, text = config.vision_config, config.text_config
        self.side = vision.image_size // vision.patch_size
        self.square = self.side // math.isqrt(config.mm_tokens_per_image)
        if self.square < 1 or (self.side // self.square) ** 2 != config.mm_tokens_per_image:
            raise ConfigError(
                f"mm_tokens_per_image={config.mm_tokens_per_image} is invalid: the {self.side} x "
                f"{self.side} patches of an image do not form this number of equal squares; use "
                "the square of a divisor"
            )
        self.mm_soft_emb_norm = parts.norm(
            vision.hidden_size, eps=vision.layer_norm_eps, offset=1.0, scale_first=True
        )
        sizes = vision.hidden_size, text.hidden_size
        self.mm_input_projection_weight = parts.table(*sizes, axes=(None, "embed"))
        self.precision = parts.precision

    def __call__(self, x: Float[Array, "t n v"]) -> Float[Array, "t m d"]:
        t, _, v = x.shape
        side = self.side // self.square
        grid = x.reshape(t, self.side, self.side, v)[:, : side * self.square, : side * self.square]
        grid = grid.reshape(t, side, self.square, side, self.square, v)
        x = self.mm_soft_emb_norm(grid.mean(axis=(2, 4)).reshape(t, side * side, v))
        weight = self.mm_input_projection_weight.get_value().astype(x.dtype)
        return jnp.matmul(x, weight, precision=self.precision)


class Gemma3MultimodalModel(TiledImageTextModel):
    """Vision tower, projector and decoder."""

    config_class = Gemma3MultimodalConfig
    projector_class = Gemma3Projector


@register_module(TaskType.IMAGE_TEXT_TO_TEXT, config=Gemma3MultimodalConfig, model_type="gemma3")
class Gemma3ForConditionalGeneration(ConditionalLM):
    """Gemma 3 with a language-model head."""

    body_class = Gemma3MultimodalModel
    modality = TILES
    reads_ahead = "image"
    TIED_WEIGHTS = NESTED_TIED
    OTHER_NAMES = TILED_NAMES
    MODULES = TILED_MODULES
    WEIGHTS = TILED_WEIGHTS
