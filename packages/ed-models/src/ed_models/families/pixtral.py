"""The vision tower of Pixtral (Mistral AI 2024), which reads images of any size.

- attention connects the patches of one image; RMS norms and gated feed-forward layers
- rotary positions by row and column, whose frequencies alternate
- no norm follows the last layer

The numbers follow Hugging Face's `modeling_pixtral.py`.

Legend: b rows, i images of a row, p patches of a row, c channels, h height, w width, s side of a
patch, f = c * s * s, d hidden, k head dimension.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.outputs import BaseModelOutput
from ed_infra.registry import register_config, register_module
from ed_infra.rope.rotation import angles
from ed_layers.context import ALL_LAYERS, Rope
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ed_models.base.module import EasyDeLBaseModule
from ed_models.body.context import layer_context
from ed_models.body.packed_images import packed_on_device
from ed_models.body.patch_grids import PatchPlaces
from ed_models.body.patch_tower import PatchLayer, PatchProjection
from ed_models.body.patch_weights import PIXTRAL


@register_config("pixtral")
class PixtralVisionConfig(EasyDeLBaseConfig, transformers.PixtralVisionConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "pixtral"


def pixtral_layer(parts: Parts, index: int) -> PatchLayer:
    """Create a layer of the tower."""
    return PatchLayer(parts, mlp=GatedMLP(parts), bias=False, out_bias=False)


@register_module(TaskType.BASE_VISION, config=PixtralVisionConfig, model_type="pixtral")
class PixtralVisionModel(EasyDeLBaseModule):
    """A projection of patches, a norm, and layers."""

    input_names = ("pixel_values", "image_grid_thw")
    WEIGHTS = PIXTRAL

    def __init__(
        self,
        config: EasyDeLBaseConfig,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        *,
        rngs: nnx.Rngs,
    ):
        super().__init__(config, dtype, param_dtype, precision)
        parts = Parts(config, rngs, self.dtype, self.param_dtype, precision)
        parts = replace(parts, norm_of_family=partial(parts.norm, eps=1e-5))
        self.patch_embed = PatchProjection(parts, config.hidden_size)
        self.patch_norm = parts.own_norm(config.hidden_size)
        self.blocks = parts.stack(pixtral_layer, config.num_hidden_layers)

    def __call__(
        self,
        pixel_values: Float[Array, "b p f"] | Float[Array, "b c h w"],
        image_grid_thw: Int[Array, "b i 3"] | None = None,
        *,
        merge: int = 1,
        output_hidden_states: bool = False,
    ) -> BaseModelOutput:
        """Encode images.

        Args:
            pixel_values: packed patches of the images of each row, or one image per row.
            image_grid_thw: 1, and the numbers of rows and columns of patches, of each image of a
                row of packed patches; zeros for missing images.
            merge: side of the blocks of patches that are neighbors in the packed order.
            output_hidden_states: also return the input of every layer and the output of the last.

        Returns:
            Hidden states of the patches [b, p, d].
        """
        config = self.config
        if image_grid_thw is None:
            pixel_values, image_grid_thw = packed_on_device(
                jnp.asarray(pixel_values), config.patch_size
            )
        places = PatchPlaces.of(jnp.asarray(image_grid_thw), pixel_values.shape[1], merge=merge)
        x = self.patch_norm(self.patch_embed(pixel_values))
        ctx, _ = layer_context(
            config, (x.shape[0], x.shape[1]), segment_ids=places.frames, ropes={}
        )
        ctx = replace(ctx, rope={ALL_LAYERS: self.rope(places.position_ids)})
        x, _, _, hidden = self.blocks(x, ctx, keep_hidden=output_hidden_states)
        return BaseModelOutput(x, hidden_states=hidden)

    def rope(self, positions: Int[Array, "2 b p"]) -> Rope:
        """Return cosine and sine of rows and columns: even frequencies rotate by the row, odd ones
        by the column."""
        config = self.config
        head_dim = config.hidden_size // config.num_attention_heads
        exponents = np.arange(0, head_dim, 2) / head_dim
        frequencies = (1 / float(config.rope_parameters["rope_theta"]) ** exponents).astype(
            np.float32
        )
        tables = [angles(at, frequencies[axis::2]) for axis, at in enumerate(positions)]
        cos, sin = (
            jnp.concatenate(table_parts, axis=-1) for table_parts in zip(*tables, strict=True)
        )
        return cos, sin
