"""Vision-language models whose processors return padded patches with their places (Gemma 4).

Legend: i images, q patches of an image with padding, f numbers of a patch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ed_infra.inputs import GRID, POSITIONS

from ed_models.body.packed_images import from_positions
from ed_models.tasks.packed_image_text import PackedImageTextLM


class PlacedImageTextLM(PackedImageTextLM):
    """A language model that reads images of any size, with the positions of texts.

    `batched_inputs` also accepts the arrays of a processor of transformers: `pixel_values` [i, q,
    f], row by row, and `image_position_ids` [i, q, 2], the column and row of each patch.
    """

    input_names = (*PackedImageTextLM.input_names, POSITIONS)

    def batched_inputs(self, input_ids: Any, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arrays of prompts with a row for each prompt; see `PatchForm.rows`."""
        form = self.patch_form
        if POSITIONS in arrays and form is not None:
            arrays = dict(arrays)
            packed_arrays = from_positions(
                arrays["pixel_values"], arrays.pop(POSITIONS), form.merge
            )
            arrays["pixel_values"], arrays[GRID] = packed_arrays
        return super().batched_inputs(input_ids, arrays)
