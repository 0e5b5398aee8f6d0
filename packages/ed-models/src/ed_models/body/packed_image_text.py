"""The body of vision-language models whose tower may read packed patches (Pixtral).

Legend: b rows, i images of a row, p patches of a row, f numbers of a patch, c channels, h height, w
width.
"""

from __future__ import annotations

from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError
from ed_infra.inputs import Encoded
from flax import nnx
from jaxtyping import Array, Float, Int

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

    def encode(
        self,
        pixel_values: Float[Array, "b p f"] | Float[Array, "b i c h w"],
        image_grid_thw: Int[Array, "b i 3"] | None = None,
    ) -> Encoded:
        """Return the features of all images of a row, one after another.

        Args:
            pixel_values: packed patches, or images of one size.
            image_grid_thw: the numbers of patches of each image, of packed patches.

        Raises:
            ConfigError: the tower reads packed patches, and there are no grids.
        """
        form = self.patch_form
        if form is None:
            return super().encode(pixel_values)
        if image_grid_thw is None:
            raise ConfigError(
                "pixel_values are packed patches: pass image_grid_thw, too, or the arrays of "
                "model.batched_inputs"
            )
        hidden = self.select_hidden_states(
            pixel_values, image_grid_thw=image_grid_thw, merge=form.merge
        )
        features = self.multi_modal_projector(hidden)
        return Encoded(features, real_features(image_grid_thw, features.shape[1], form.merge))
