"""The processor of Pixtral and Mistral 3 for environments without torchvision.

`PixtralProcessor` of transformers imports torchvision, although its image processor has a form for
PIL. The class here has the same name, settings and rules, so `save_pretrained` writes the same
files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import ProcessorMixin
from transformers.processing_utils import MultiModalData


class PixtralProcessor(ProcessorMixin):
    """A tokenizer and an image processor.

    Args:
        image_processor: `PixtralImageProcessorPil`, which returns images and their sizes.
        tokenizer: the tokenizer, which has the three tokens.
        patch_size: side of a patch in pixels.
        spatial_merge_size: patches along the side of a block, which becomes one feature.
        chat_template: template of conversations.
        image_token: placeholder token of a feature.
        image_break_token: token after each row of features but the last.
        image_end_token: token after the last row of features.
    """

    attributes = ["image_processor", "tokenizer"]  # noqa: RUF012

    def __init__(
        self,
        image_processor: object = None,
        tokenizer: Any = None,
        patch_size: int = 16,
        spatial_merge_size: int = 1,
        chat_template: str | None = None,
        image_token: str = "[IMG]",
        image_break_token: str = "[IMG_BREAK]",
        image_end_token: str = "[IMG_END]",
        **options: object,
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.patch_size, self.spatial_merge_size = patch_size, spatial_merge_size
        self.image_token = image_token
        self.image_break_token, self.image_end_token = image_break_token, image_end_token
        names = image_token, image_break_token, image_end_token
        self.image_token_ids: list[int] = [tokenizer.convert_tokens_to_ids(name) for name in names]
        self.image_token_id, self.image_break_token_id, self.image_end_token_id = (
            self.image_token_ids
        )

    @property
    def model_input_names(self) -> list[str]:
        """Names of the arrays of a call."""
        return [*self.tokenizer.model_input_names, *self.image_processor.model_input_names]

    def _process_images(self, images: Any, **options: Any) -> Any:
        options["patch_size"] = self.patch_size * self.spatial_merge_size
        return super()._process_images(images, **options)

    def replace_image_token(
        self, image_inputs: Mapping[str, Any], image_idx: int, **options: object
    ) -> str:
        """Return the text of the tokens of an image.

        Args:
            image_inputs: arrays of the image processor, of which `image_sizes` is read.
            image_idx: number of the image.
            options: without effect.
        """
        block = self.patch_size * self.spatial_merge_size
        height, width = image_inputs["image_sizes"][image_idx]
        row = self.image_token * (int(width) // block)
        rows = [row] * (int(height) // block)
        return self.image_break_token.join(rows) + self.image_end_token

    def _get_num_multimodal_tokens(
        self, image_sizes: Sequence[Sequence[int]] | None = None, **options: Any
    ) -> MultiModalData:
        """Return the numbers of tokens of images with these heights and widths."""
        from transformers.models.pixtral.image_processing_pil_pixtral import (
            get_resize_output_image_size,
        )

        if image_sizes is None:
            return MultiModalData()
        size_option = self._merge_kwargs(**options)["images_kwargs"].get("size")
        edge = (size_option or self.image_processor.size)["longest_edge"]
        block, counts = self.patch_size * self.spatial_merge_size, list[int]()
        for size in image_sizes:
            blank = np.broadcast_to(np.uint8(0), (*size, 3))
            height, width = get_resize_output_image_size(blank, edge, block)
            counts.append((width // block + 1) * (height // block))
        return MultiModalData(num_image_tokens=counts, num_image_patches=[1] * len(counts))
