"""Bodies of vision-language models over packed patches: a vision tower and a decoder.

Legend: b rows, s positions, i images of a row, p patches of a row, f numbers of a patch, n features
of a row, d hidden.
"""

from __future__ import annotations

from abc import abstractmethod

import jax
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.inputs import GRID, Encoded, Inputs
from ed_layers.parts import Parts
from flax import nnx

from ed_models.body.conditional import ConditionalModel
from ed_models.body.packed_images import PatchForm
from ed_models.body.patch_grids import real_features
from ed_models.body.patch_tower import PatchTower


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
