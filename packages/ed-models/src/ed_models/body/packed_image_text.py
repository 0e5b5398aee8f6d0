"""The body of vision-language models whose tower may read packed patches (Pixtral).

Legend: b rows, i images of a row, p patches of a row, f numbers of a patch, c channels, h height, w
width.
"""

from __future__ import annotations

import jax
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError
from ed_infra.inputs import GRID, Encoded, Inputs
from flax import nnx

from ed_models.body.packed_images import PatchForm
from ed_models.body.patch_grids import real_features
from ed_models.body.tiles import TiledImageTextModel


class PackedImageTextModel(TiledImageTextModel):
    """A vision tower, a projector and a decoder. The tower of Pixtral reads images of any size."""

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
        return PatchForm(vision.patch_size, vision.num_channels, merge, ends_rows=True)

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
