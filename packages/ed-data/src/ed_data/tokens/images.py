"""Images of one size for vision-language models: placeholder tokens and pixel values.

The processor is that of the checkpoint (`transformers.AutoProcessor`). Its image processor runs
without torch if it has a PIL backend, as those of CLIP and LLaVA have.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import fsspec
import numpy as np
from numpy.typing import NDArray

from ed_data.errors import DataError
from ed_data.rows.example import RowImage

if TYPE_CHECKING:
    import PIL.Image
    from transformers import PreTrainedTokenizerBase

#: An image whose arrays have the shape of all images.
BLANK = RowImage(np.zeros((32, 32, 3), np.uint8), "a blank image")


class ImageProcessor(Protocol):
    """The image processor of a checkpoint, such as `transformers.CLIPImageProcessor`."""

    def __call__(self, *, images: list[Any], return_tensors: str) -> Any: ...

    def to_dict(self) -> dict[str, Any]: ...


class FeatureCounts(Protocol):
    """The result of a processor for images of given sizes: `transformers.MultiModalData`."""

    num_image_tokens: list[int]
    num_image_patches: list[int]


class ModelProcessor(Protocol):
    """A processor of transformers, such as `LlavaProcessor`."""

    image_processor: ImageProcessor
    tokenizer: PreTrainedTokenizerBase

    def _get_num_multimodal_tokens(self, image_sizes: list[list[int]]) -> FeatureCounts: ...


class ImageEncoder:
    """Counts the features of images and computes their arrays.

    Args:
        processor: the processor of the checkpoint.
        placed: whether tokens mention the images. Otherwise an image processor is enough.

    Attributes:
        token: id of the placeholder token of an image feature; None if tokens mention no images.
        processor: the processor.

    Raises:
        DataError: the processor does not define a placeholder token, or cannot count features.
    """

    def __init__(self, processor: ModelProcessor | ImageProcessor, *, placed: bool = True) -> None:
        self.processor: Any = processor
        self.token: int | None = None
        self._to_pixels: Any = getattr(processor, "image_processor", processor)
        kind = type(processor).__name__
        if not placed:
            if not callable(self._to_pixels) or not hasattr(self._to_pixels, "size"):
                raise DataError(
                    f"{kind} is no processor of images: pass the AutoProcessor or the "
                    "AutoImageProcessor of the checkpoint"
                )
            return
        for name in ("image_processor", "tokenizer", "_get_num_multimodal_tokens"):
            if not hasattr(processor, name):
                raise DataError(
                    f"{kind} is not a processor of images and text that can count image tokens: it "
                    f"has no {name!r}; pass the AutoProcessor of a vision-language checkpoint"
                )
        token: object = getattr(processor, "image_token_id", None)
        if token is None and isinstance(text := getattr(processor, "image_token", None), str):
            token = self.processor.tokenizer.convert_tokens_to_ids(text)
        if not isinstance(token, int):
            raise DataError(f"{kind} defines no image token: set its image_token")
        self.token = token

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that the placeholders and pixel values depend on."""
        own = {
            name: value
            for name, value in vars(self.processor).items()
            if isinstance(value, str | int | float | bool | None) and name != "chat_template"
        }
        values = [type(self.processor).__name__, own, self._to_pixels.to_dict()]
        text = json.dumps(values, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """Shape [channels, height, width] of the pixel values of an image."""
        channels, height, width = self._processed(BLANK).shape
        return channels, height, width

    def count(self, image: RowImage) -> int:
        """Return the number of features, and so of placeholder tokens, of an image.

        Raises:
            DataError: the image cannot be read, or the processor splits it into several images.
        """
        found = self.processor._get_num_multimodal_tokens(image_sizes=[[*size_of(image)]])
        if found.num_image_patches != [1]:
            raise DataError(
                f"{image.where}: {type(self.processor).__name__} splits an image into "
                f"{found.num_image_patches} images; only processors with one array per image are "
                "supported"
            )
        return int(found.num_image_tokens[0])

    def width(self, rows: Sequence[Sequence[RowImage]]) -> tuple[int, ...]:
        """Return the sizes of the arrays for the images of all rows of a batch."""
        return (max([1, *map(len, rows)]),)

    def arrays(
        self, images: Mapping[int, Sequence[RowImage]], rows: int, width: tuple[int, ...]
    ) -> dict[str, NDArray[Any]]:
        """Return `pixel_values` [b, i, c, h, w], float32, padded with zeros.

        Args:
            images: number of a row -> the images of the row in order.
            rows: number of rows b.
            width: see `width`.
        """
        pixels = np.zeros((rows, *width, *self.shape), np.float32)
        for row, of_row in images.items():
            for place, image in enumerate(of_row):
                pixels[row, place] = self.pixel_values(image)
        return {"pixel_values": pixels}

    def pixel_values(self, image: RowImage) -> NDArray[np.float32]:
        """Return the pixel values [channels, height, width] of an image.

        Raises:
            DataError: the image cannot be decoded, or its array has another shape than others.
        """
        pixels = self._processed(image)
        if pixels.shape != self.shape:
            raise DataError(
                f"{image.where}: the processor returned pixel values of shape {pixels.shape}, but "
                f"{self.shape} for other images; use an image processor that resizes or crops all "
                "images to one size"
            )
        return pixels

    def _processed(self, image: RowImage) -> NDArray[np.float32]:
        return np.asarray(self.processed(image)["pixel_values"][0], np.float32)

    def processed(self, image: RowImage) -> Mapping[str, Any]:
        """Return the output of the image processor for one image.

        Raises:
            DataError: the image cannot be decoded.
        """
        source = image.source
        if isinstance(source, np.ndarray):
            decoded = np.repeat(source[..., None], 3, axis=2) if source.ndim == 2 else source
        else:
            opened = _opened(source, image.where)
            try:
                decoded = opened.convert("RGB")
            except (OSError, ValueError) as error:
                raise _unreadable(image.where, error) from error
        return self._to_pixels(images=[decoded], return_tensors="np")


def size_of(image: RowImage) -> tuple[int, int]:
    """Return height and width of an image.

    Raises:
        DataError: the image cannot be read.
    """
    source = image.source
    if isinstance(source, np.ndarray):
        return source.shape[0], source.shape[1]
    width, height = _opened(source, image.where).size
    return height, width


def _opened(source: str | bytes | dict[str, Any], where: str) -> PIL.Image.Image:
    """Open an image; its pixels are decoded when they are read."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise DataError(
            "reading images requires the package pillow: install ed-data[images]"
        ) from error
    try:
        if isinstance(source, str):
            fs, path = fsspec.core.url_to_fs(source)
            raw: bytes = fs.cat_file(path)
        else:
            raw = source["bytes"] if isinstance(source, dict) else source
        opened = Image.open(io.BytesIO(raw))
        ImageOps.exif_transpose(opened, in_place=True)
        return opened
    except (OSError, ValueError) as error:
        raise _unreadable(where, error) from error


def _unreadable(where: str, error: Exception) -> DataError:
    return DataError(
        f"{where}: the image cannot be decoded: {error}; correct the row, or set on_error: skip"
    )
