"""Vision-language models whose processors return the patches of an image row by row (Kimi K2.5).

Legend: p patches of all images, c channels, s side of a patch, f = c * s * s, m patches along the
side of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from ed_infra.inputs import GRID

from ed_models.body.packed_images import in_blocks
from ed_models.tasks.packed_image_text import PackedImageTextLM


class RasterImageTextLM(PackedImageTextLM):
    """A language model that reads images of any size, with the positions of texts.

    `pixel_values` [b, p, f] contains the patches of the images of a row, in which the patches of a
    block are neighbors. `batched_inputs` also accepts the arrays of a processor of transformers:
    `pixel_values` [p, c, s, s], row by row, and `image_grid_thw` [i, 3].
    """

    def batched_inputs(self, input_ids: Any, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arrays of prompts with a row for each prompt; see `PatchForm.rows`."""
        pixels, form = np.asarray(arrays.get("pixel_values", ())), self.patch_form
        if pixels.ndim == 4 and GRID in arrays and form is not None:
            patches = pixels.reshape(len(pixels), -1)
            arrays = {**arrays, "pixel_values": in_blocks(patches, arrays[GRID], form.merge)}
        return super().batched_inputs(input_ids, arrays)
