"""The processor of Kimi K2.5 for environments without torchvision.

The processors of transformers import torchvision. The classes here have the same names (for
`Kimi_K25ImageProcessor` with the ending `Pil`, as other processors have), settings, rules and
output, so `save_pretrained` writes the same files. PIL resizes images, so pixels of a reduced image
differ in rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Self

import numpy as np
from transformers import AutoTokenizer, ProcessorMixin
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_base import BatchFeature
from transformers.image_utils import (
    IMAGENET_STANDARD_MEAN,
    IMAGENET_STANDARD_STD,
    PILImageResampling,
    SizeDict,
)
from transformers.processing_utils import ImagesKwargs, MultiModalData


class KimiImagesKwargs(ImagesKwargs, total=False):
    """Options of a call.

    Attributes:
        max_patches: most patches of an image.
        patch_size: side of a patch in pixels.
        merge_size: patches along the side of a block, which becomes one feature.
    """

    max_patches: int
    patch_size: int
    merge_size: int


def compute_sizes(
    height: int, width: int, *, patch: int, merge: int, most: int, side: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return height and width of the reduced image, and those after padding to whole blocks.

    Args:
        height: of the image in pixels.
        width: of the image in pixels.
        patch: side of a patch in pixels.
        merge: patches along the side of a block.
        most: most patches of an image.
        side: most patches along a side.
    """
    count = max(1.0, height // patch) * max(1.0, width // patch)
    limits = math.sqrt(most / count), side * patch / height, side * patch / width
    scale = min(1.0, *limits)
    image_size = [min(max(1, int(number * scale)), side * patch) for number in (height, width)]
    block = patch * merge
    padded = [-(-number // block) * block for number in image_size]
    return (image_size[0], image_size[1]), (padded[0], padded[1])


class Kimi_K25ImageProcessorPil(PilBackend):
    """Reduces images, and returns their patches `pixel_values` [p, c, s, s], row by row, and the
    numbers of patches `image_grid_thw` [i, 3]."""

    do_resize = True
    resample = PILImageResampling.BICUBIC
    size = {"max_height": 512, "max_width": 512}  # noqa: RUF012
    max_patches = 16384
    do_rescale = True
    do_normalize = True
    image_mean = IMAGENET_STANDARD_MEAN
    image_std = IMAGENET_STANDARD_STD
    do_convert_rgb = True
    patch_size = 14
    merge_size = 2
    valid_kwargs = KimiImagesKwargs
    model_input_names = ["pixel_values", "image_grid_thw"]  # noqa: RUF012

    def _sizes(self, height: int, width: int, options: Mapping[str, Any]) -> Any:
        def of(name: str) -> Any:
            value = options.get(name)
            return getattr(self, name) if value is None else value

        size = of("size")
        most = size["max_height"] if isinstance(size, Mapping) else size.max_height
        merge, patches = of("merge_size"), of("max_patches")
        return compute_sizes(
            height, width, patch=of("patch_size"), merge=merge, most=patches, side=most
        )

    def _preprocess(self, images: list[np.ndarray], *args: Any, **options: Any) -> BatchFeature:
        side, patches, grids = options["patch_size"], list[np.ndarray](), list[list[int]]()
        for image in images:
            if options["do_resize"]:
                image_size, padded = self._sizes(image.shape[-2], image.shape[-1], options)
                image = self.resize(
                    image,
                    SizeDict(height=image_size[0], width=image_size[1]),
                    options["resample"],
                )
                padding = [(0, 0), *((0, b - a) for a, b in zip(image_size, padded, strict=True))]
                image = np.pad(image, padding)
            if options["do_rescale"]:
                image = self.rescale(image, options["rescale_factor"])
            if options["do_normalize"]:
                image = self.normalize(image, options["image_mean"], options["image_std"])
            channels, height, width = image.shape
            rows, columns = height // side, width // side
            cut = image.reshape(channels, rows, side, columns, side).transpose(1, 3, 0, 2, 4)
            patches.append(cut.reshape(rows * columns, channels, side, side))
            grids.append([1, rows, columns])
        data = {"pixel_values": np.concatenate(patches), "image_grid_thw": np.array(grids)}
        return BatchFeature(data=data, tensor_type=options["return_tensors"])

    def get_number_of_image_patches(
        self, height: int, width: int, images_kwargs: Mapping[str, Any] | None = None
    ) -> int:
        """Return the number of patches of an image with this height and width."""
        _, (down, across) = self._sizes(height, width, images_kwargs or {})
        side = (images_kwargs or {}).get("patch_size") or self.patch_size
        return (down // side) * (across // side)


class Kimi_K25Processor(ProcessorMixin):
    """A tokenizer and an image processor; videos are not supported.

    Args:
        image_processor: `Kimi_K25ImageProcessorPil`.
        tokenizer: the tokenizer, which has the token of images.
        chat_template: template of conversations.
    """

    attributes = ["image_processor", "tokenizer"]  # noqa: RUF012

    def __init__(
        self,
        image_processor: object = None,
        tokenizer: Any = None,
        chat_template: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.image_token: str = getattr(tokenizer, "image_token", "<|media_pad|>")
        self.image_token_id: int = tokenizer.convert_tokens_to_ids(self.image_token)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | PathLike, *args: Any, **options: Any
    ) -> Self:
        """Load the two parts of a directory or a hub repository; options are keywords."""
        if args:
            raise TypeError("pass the options of from_pretrained as keywords")
        name = pretrained_model_name_or_path
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        options.pop("trust_remote_code", None)
        images = Kimi_K25ImageProcessorPil.from_pretrained(name, **options)
        return cls(images, tokenizer, tokenizer.chat_template)

    @property
    def model_input_names(self) -> list[str]:
        """Names of the arrays of a call."""
        return [*self.tokenizer.model_input_names, *self.image_processor.model_input_names]

    def replace_image_token(
        self, image_inputs: Mapping[str, Any], image_idx: int, **options: object
    ) -> str:
        """Return the text of the tokens of an image.

        Args:
            image_inputs: arrays of the image processor, of which `image_grid_thw` is read.
            image_idx: number of the image.
            options: without effect.
        """
        patches = int(np.prod(np.asarray(image_inputs["image_grid_thw"][image_idx])))
        return self.image_token * (patches // self.image_processor.merge_size**2)

    def _get_num_multimodal_tokens(
        self, image_sizes: Sequence[Sequence[int]] | None = None, **options: Any
    ) -> MultiModalData:
        """Return the numbers of tokens of images with these heights and widths."""
        if image_sizes is None:
            return MultiModalData()
        image_options = self._merge_kwargs(**options)["images_kwargs"]
        merge = image_options.get("merge_size") or self.image_processor.merge_size
        patches = [
            self.image_processor.get_number_of_image_patches(*size, image_options)
            for size in image_sizes
        ]
        tokens = [count // merge**2 for count in patches]
        return MultiModalData(num_image_tokens=tokens, num_image_patches=patches)
