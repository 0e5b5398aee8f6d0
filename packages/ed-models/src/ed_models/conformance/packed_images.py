"""The subject of vision-language models with the tower of Pixtral.

Legend: i images of all rows, c channels, h height, w width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from ed_infra.testing import require_torch

from ed_models.body.image_rows import padded_rows
from ed_models.body.packed_images import PatchForm
from ed_models.conformance.image_text import ImageTextSubject
from ed_models.conformance.subjects import S

#: Rows and columns of features of the images of each row: three images, one, none, and two.
_BLOCKS = (((2, 2), (1, 2), (2, 1)), ((2, 3),), (), ((1, 1), (3, 2)))


class PackedImageTextSubject(ImageTextSubject):
    """A vision-language model whose rows contain 3, 1, 0 and 2 images of different sizes. A token
    without a feature ends each row of features, if the body has `ends_rows`."""

    def place_media(self, module_class: type[Any], length: int) -> dict[str, np.ndarray]:
        vision = self.fields["vision_config"]
        merge = 1 if self.model_type == "llava" else self.fields.get("spatial_merge_size", 2)
        ends_rows: bool = module_class.body_class.ends_rows
        form = PatchForm(vision["patch_size"], 3, merge, ends_rows=ends_rows)
        rng, side, rows = np.random.default_rng(1), form.side * merge, []
        self.pixels: list[np.ndarray] = []
        for number, sizes in enumerate(_BLOCKS):
            start, packed_images = max(self.pad) + 1, []
            for down, across in sizes:
                for _ in range(down):
                    self.ids[number, start : start + across] = self.image_token
                    start += across + ends_rows
                start += 1
                self.pixels.append(rng.normal(size=(3, down * side, across * side)))
                packed_images.append(
                    form.pack_image(self.pixels[-1], np.array(self.pixels[-1].shape[1:]))
                )
            assert start <= S, "the images fit"
            patches = [np.zeros((0, form.numbers)), *(patches for patches, _ in packed_images)]
            grids = [grid for _, grid in packed_images]
            rows.append((np.concatenate(patches), np.reshape(grids, (-1, 3))))
        return padded_rows(rows, form.numbers, merge)

    def build_processor_arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of a processor: padded images [i, c, h, w], and their sizes [i, 2]."""
        sizes = np.array([image.shape[1:] for image in self.pixels])
        most = sizes.max(axis=0)
        padding = [((0, 0), (0, most[0] - h), (0, most[1] - w)) for h, w in sizes]
        images = [np.pad(image, pad) for image, pad in zip(self.pixels, padding, strict=True)]
        return {"pixel_values": np.stack(images).astype(np.float32), "image_sizes": sizes}

    def prompts(self) -> dict[str, Any]:
        return {"input_ids": self.ids, "attention_mask": self.mask, **self.build_processor_arrays()}

    def with_images(self, inputs: dict[str, Any]) -> dict[str, Any]:
        torch = require_torch()
        return {
            **inputs,
            **{name: torch.tensor(x) for name, x in self.build_processor_arrays().items()},
        }
