"""Vision-language models with a vision tower for packed patches, and positions of texts (Pixtral).

Legend: b rows, s positions, i images of a row, p patches of a row, f numbers of a patch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast

import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.inputs import GRID, SIZES

from ed_models.body.packed_images import PatchForm
from ed_models.tasks.image_text import ImageTextLM


class PackedBody(Protocol):
    """A body whose tower may read packed patches."""

    @property
    def patch_form(self) -> PatchForm | None:
        """The patches that the tower reads; None = the tower reads images of one size."""
        ...


class PackedImageTextLM(ImageTextLM):
    """A language model that reads images of any size, if its tower does.

    `pixel_values` [b, p, f] contains the patches of the images of a row, and `image_grid_thw`
    [b, i, 3] a 1 and their numbers of rows and columns, padded with zeros. `batched_inputs` creates
    these arrays from the padded images and `image_sizes` of a processor. For a tower that reads
    images of one size, `pixel_values` is [b, i, c, h, w].
    """

    image_names = ("pixel_values", GRID)
    input_names = (*ImageTextLM.input_names, GRID, SIZES)

    @property
    def patch_form(self) -> PatchForm | None:
        """The patches that the tower reads; None = the tower reads images of one size."""
        return cast(PackedBody, self.model).patch_form

    @property
    def encoded_features(self) -> int:
        """Size of the embeddings that `encode` returns."""
        return self.config.text_config.hidden_size

    def batched_inputs(self, input_ids: Any, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arrays of prompts with a row for each prompt; see `PatchForm.rows`.

        Raises:
            ConfigError: the tower reads images of one size, and there are sizes.
        """
        form = self.patch_form
        if form is None and SIZES in arrays:
            raise ConfigError(f"the vision tower reads images of one size: omit {SIZES}")
        if form is None:
            return super().batched_inputs(input_ids, arrays)
        return form.rows(np.asarray(input_ids) == self.config.image_token_id, arrays)
