"""Bodies of vision-language models over packed patches: a vision tower and a decoder.

Legend: b rows, s positions, i images of a row, p patches of a row, f numbers of a patch, n features
of a row, v and d hidden size of the tower and of the decoder, c channels, h height, w width.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import jax
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError
from ed_infra.inputs import GRID, Encoded, Inputs
from ed_layers.activations import activation
from ed_layers.parts import Parts
from flax import nnx
from jaxtyping import Array, Float

from ed_models.body.conditional import ConditionalModel
from ed_models.body.packed_images import PatchForm
from ed_models.body.patch_grids import real_features
from ed_models.body.patch_tower import PatchTower
from ed_models.body.tiles import TiledImageTextModel


class PatchedImageTextModel(ConditionalModel):
    """A tower over packed patches under `visual`, and a decoder under `language_model`."""

    def add_towers(self, config: EasyDeLBaseConfig, rngs: nnx.Rngs) -> None:
        numbers = self.dtype, self.param_dtype, self.precision
        self.visual = self.tower(Parts(config.vision_config, rngs, *numbers))

    @abstractmethod
    def tower(self, parts: Parts) -> PatchTower:
        """Create the vision tower; `parts.config` is the vision configuration."""

    @property
    def encoded_features(self) -> int:
        return self.visual.features

    @property
    def patch_form(self) -> PatchForm:
        """The patches that the tower reads."""
        config = self.config
        vision = config.vision_config
        frames = vision.in_channels * vision.temporal_patch_size
        return PatchForm(vision.patch_size, frames, vision.spatial_merge_size, has_axes=True)

    def encode(self, inputs: Inputs, *, key: jax.Array | None = None) -> Encoded:
        """Return the features of all images of a row, one image after another.

        Args:
            inputs: `pixel_values` [b, p, f] and `image_grid_thw` [b, i, 3].
            key: without effect: towers are deterministic.
        """
        grids = inputs[GRID]
        features = self.visual(inputs["pixel_values"], grids)
        return Encoded(features, real_features(grids, features.shape[1], self.visual.merge))


class MergingProjector(nnx.Module):
    """A norm, a linear layer from the patches of a block to one feature, and two linear layers
    (Mistral 3).

    Args:
        parts: creates the layers; `config` is that of the whole model.
        bias: whether the last two layers have biases.
        act: activation between them.
    """

    def __init__(self, parts: Parts, *, bias: bool = False, act: str = "gelu"):
        config = parts.config
        v, d = config.vision_config.hidden_size, config.text_config.hidden_size
        self.size, self.act = config.spatial_merge_size**2, act
        self.norm = parts.norm(v, eps=config.text_config.rms_norm_eps)
        self.patch_merger = parts.linear(v * self.size, v, axes=(None, "embed"))
        self.linear_1 = parts.linear(v, d, axes=(None, "embed"), bias=bias)
        self.linear_2 = parts.linear(d, d, axes=("embed", None), bias=bias)

    def __call__(self, x: Float[Array, "b p v"]) -> Float[Array, "b n d"]:
        b, p, v = x.shape
        # The inputs of the linear layer are the patches of each channel.
        blocks = self.norm(x).reshape(b, p // self.size, self.size, v).swapaxes(2, 3)
        x = self.patch_merger(blocks.reshape(b, p // self.size, v * self.size))
        return self.linear_2(activation(self.act)(self.linear_1(x)))


class PackedImageTextModel(TiledImageTextModel):
    """A vision tower, a projector and a decoder. The tower of Pixtral reads images of any size."""

    #: Whether a token without a feature ends each row of features of an image.
    ends_rows: ClassVar[bool] = True

    def add_towers(self, config: EasyDeLBaseConfig, rngs: nnx.Rngs) -> None:
        super().add_towers(config, rngs)
        _ = self.patch_form  # raises an error for a configuration that is not supported

    @property
    def patch_form(self) -> PatchForm | None:
        """The patches that the tower reads; None = the tower reads images of one size.

        Raises:
            ConfigError: the strategy of the features would omit the first patch of a row.
        """
        config = self.config
        vision = config.vision_config
        if vision.model_type != "pixtral":
            return None
        if getattr(config, "vision_feature_select_strategy", "full") != "full":
            raise ConfigError(
                f"vision_feature_select_strategy={config.vision_feature_select_strategy!r} is "
                "not supported with vision_config.model_type='pixtral', whose tower has no class "
                "token: use 'full'"
            )
        merge = getattr(config, "spatial_merge_size", 1)
        return PatchForm(vision.patch_size, vision.num_channels, merge, ends_rows=self.ends_rows)

    def encode(self, inputs: Inputs, *, key: jax.Array | None = None) -> Encoded:
        """Return the features of all images of a row, one after another.

        Args:
            inputs: `pixel_values`, packed patches [b, p, f] or images of one size [b, i, c, h, w];
                and of packed patches `image_grid_thw` [b, i, 3], the numbers of patches.
            key: without effect: towers are deterministic.

        Raises:
            ConfigError: the tower reads packed patches, and there are no grids.
        """
        form, grids = self.patch_form, inputs.get(GRID)
        if form is None:
            return super().encode(inputs.select(("pixel_values",)))
        if grids is None:
            raise ConfigError(
                "pixel_values are packed patches: pass image_grid_thw, too, or the arrays of "
                "model.batched_inputs"
            )
        hidden = self.select_hidden_states(
            inputs["pixel_values"], image_grid_thw=grids, merge=form.merge
        )
        features = self.multi_modal_projector(hidden)
        return Encoded(features, real_features(grids, features.shape[1], form.merge))
