"""Idefics3 (Laurençon et al. 2024) and SmolVLM: a vision tower over tiles, a connector, and
a decoder such as Llama.

- an image is a grid of tiles and the whole image in the size of a tile; each tile has equally many
  features
- a tile may have padding, which changes the positions of its patches
- the connector joins squares of `scale_factor` x `scale_factor` patches

The numbers follow Hugging Face's `modeling_idefics3.py` and `modeling_smolvlm.py`.

Legend: t tiles, c channels, h height, w width, n patches of a tile, m features of a tile, v and d
hidden size of the tower and of the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.masks import MaskInfo
from ed_infra.outputs import BaseModelOutput
from ed_infra.registry import register_config, register_module
from ed_layers.parts import Parts
from flax import nnx
from jaxtyping import Array, Bool, Float, Int
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig as _Vision
from transformers.models.smolvlm.configuration_smolvlm import SmolVLMVisionConfig as _SmolVision

from ed_models.body.context import layer_context
from ed_models.body.tiles import TiledImageTextModel, joined_squares
from ed_models.body.vision import VisionTower, get_height_width, tower_rules
from ed_models.modalities.images import MASKED_TILES
from ed_models.tasks.conditional import ConditionalLM
from ed_models.weights.rules import NESTED_TIED, STANDARD, renamed

#: Rules of the names of checkpoints.
TILE_WEIGHTS = (
    *tower_rules("model.vision_tower", "model.vision_model"),
    *renamed(
        {
            "model.language_model": "model.text_model",
            "model.multi_modal_projector": "model.connector.modality_projection",
        },
        *STANDARD,
    ),
)


class Idefics3VisionConfig(EasyDeLBaseConfig, _Vision):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "idefics3_vision"


class SmolVLMVisionConfig(EasyDeLBaseConfig, _SmolVision):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "smolvlm_vision"


@register_config("idefics3")
class Idefics3Config(EasyDeLBaseConfig, transformers.Idefics3Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`.

    The execution fields also apply to `text_config` and `vision_config`.
    """

    model_type = "idefics3"
    nested_configs: ClassVar[Mapping[str, type]] = {"vision_config": Idefics3VisionConfig}


@register_config("smolvlm")
class SmolVLMConfig(EasyDeLBaseConfig, transformers.SmolVLMConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`.

    The execution fields also apply to `text_config` and `vision_config`.
    """

    model_type = "smolvlm"
    nested_configs: ClassVar[Mapping[str, type]] = {"vision_config": SmolVLMVisionConfig}


class Idefics3VisionTower(VisionTower):
    """SigLIP's tower without pooling, over tiles with padding."""

    def __call__(
        self,
        pixel_values: Float[Array, "t c h w"],
        *,
        pixel_attention_mask: Int[Array, "t h w"] | None = None,
        **inputs: Any,
    ) -> BaseModelOutput:
        """Return hidden states [t, n, v]; `pixel_attention_mask` is nonzero for pixels."""
        x = self.embeddings.patch_embedding(pixel_values)
        t, rows, columns, v = x.shape
        real = jnp.ones((t, rows, columns), bool)
        if pixel_attention_mask is not None:
            p, q = get_height_width(self.config.patch_size)
            pixels = pixel_attention_mask[:, : rows * p, : columns * q] != 0
            real = pixels.reshape(t, rows, p, columns, q).any(axis=(2, 4))
        table = self.embeddings.vectors("position_embedding")
        x = x.reshape(t, -1, v) + table[positions(real, self.embeddings.grid[0])]
        keys = real.reshape(t, -1).astype(jnp.int32)
        index = jnp.broadcast_to(jnp.arange(keys.shape[1], dtype=jnp.int32), keys.shape)
        # Padding does not count as a key, but its features are features of the tile.
        mask_info = MaskInfo(jnp.ones_like(keys), keys, index, index, causal=False)
        ctx, _ = layer_context(self.config, keys.shape, mask_info=mask_info, ropes={}, **inputs)
        return BaseModelOutput(self.norm(self.layers(x, ctx)[0]))


def positions(real: Bool[Array, "t rows columns"], side: int) -> Int[Array, "t n"]:
    """Return the positions of patches: their places in a tile without padding, scaled to the grid.

    Args:
        real: which patches are not padding.
        side: number of patches along the side of the grid of trained positions.
    """
    borders = jnp.asarray(np.arange(1 / side, 1.0, 1 / side), jnp.float32)

    def buckets(count: Int[Array, " t"], size: int) -> Int[Array, "t size"]:
        step = 1.0 / jnp.maximum(count, 1).astype(jnp.float32)
        places = jnp.arange(size, dtype=jnp.float32)[None] * step[:, None]
        places = jnp.minimum(places, np.float32(1.0 - 1e-6))
        return jnp.searchsorted(borders, places, side="right").astype(jnp.int32)

    t, rows, columns = real.shape
    row = buckets(real[:, :, 0].sum(axis=1), rows)
    column = buckets(real[:, 0].sum(axis=1), columns)
    places = row[:, :, None] * side + column[:, None]
    return jnp.where(real, places, 0).reshape(t, -1)


class Idefics3Connector(nnx.Module):
    """Joins squares of patches and projects them to the decoder."""

    def __init__(self, parts: Parts):
        config: Idefics3Config = parts.config
        self.scale = config.scale_factor
        inputs = config.vision_config.hidden_size * self.scale**2
        self.proj = parts.linear(inputs, config.text_config.hidden_size, axes=(None, "embed"))

    def __call__(self, x: Float[Array, "t n v"]) -> Float[Array, "t m d"]:
        return self.proj(joined_squares(x, self.scale))


class Idefics3Model(TiledImageTextModel):
    """Vision tower, connector and decoder."""

    config_class = Idefics3Config
    projector_class = Idefics3Connector
    tower_class = Idefics3VisionTower


@register_module(TaskType.IMAGE_TEXT_TO_TEXT, config=Idefics3Config, model_type="idefics3")
class Idefics3ForConditionalGeneration(ConditionalLM):
    """Idefics3 with a language-model head."""

    body_class = Idefics3Model
    modality = MASKED_TILES
    TIED_WEIGHTS = NESTED_TIED
    WEIGHTS = TILE_WEIGHTS


class SmolVLMModel(Idefics3Model):
    """Vision tower, connector and decoder."""

    config_class = SmolVLMConfig


@register_module(TaskType.IMAGE_TEXT_TO_TEXT, config=SmolVLMConfig, model_type="smolvlm")
class SmolVLMForConditionalGeneration(ConditionalLM):
    """SmolVLM with a language-model head."""

    body_class = SmolVLMModel
    modality = MASKED_TILES
    TIED_WEIGHTS = NESTED_TIED
    WEIGHTS = TILE_WEIGHTS
