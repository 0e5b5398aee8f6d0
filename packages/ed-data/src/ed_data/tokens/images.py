"""Images for vision-language models: their tokens, and the pixel values of their tiles.

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

import numpy as np
from numpy.typing import NDArray

from ed_data.errors import DataError
from ed_data.media_access import FileTooLargeError, RemoteFile, read_media
from ed_data.rows.example import RowImage
from ed_data.tokens.items import MediumTokens

if TYPE_CHECKING:
    import PIL.Image
    from transformers import PreTrainedTokenizerBase

#: An image whose arrays have the shape of all images.
BLANK = RowImage(np.zeros((32, 32, 3), np.uint8), "a blank image")
#: A small image, for processors that encode each of several images otherwise than a single one.
NEIGHBOUR = np.zeros((2, 2, 3), np.uint8)
#: Largest number of sizes of images whose tokens are kept.
_MAX_SIZES = 2**17
#: Largest number of bytes and of pixels of an image. The pixels are counted before decoding.
MAX_BYTES, MAX_PIXELS = 2**28, 2**26
#: Formats whose decoders run other programs (Ghostscript).
_REFUSED_FORMATS = ("EPS",)
#: Names of the sizes of images, [i, 2], and of their rows and columns of tiles, [i, 2]. Models that
#: omit padding read these arrays (LLaVA-NeXT).
SIZES, GRIDS = "image_sizes", "image_grids"
#: Name of the numbers of images of each text. A processor that returns the numbers splits an image
#: into tiles only if its text has no other image (LLaVA-OneVision).
_COUNTS = "batch_num_images"


class ImageProcessor(Protocol):
    """The image processor of a checkpoint, such as `transformers.CLIPImageProcessor`."""

    def __call__(self, *, images: list[Any], return_tensors: str) -> Any: ...

    def to_dict(self) -> dict[str, Any]: ...


class FeatureCounts(Protocol):
    """The result of a processor for images of given sizes: `transformers.MultiModalData`."""

    num_image_tokens: list[int]
    num_image_patches: list[int]


class ModelProcessor(Protocol):
    """A processor of transformers, such as `LlavaProcessor`.

    Attributes:
        image_token: the text that a chat template writes for an image.
    """

    image_token: str
    image_processor: ImageProcessor
    tokenizer: PreTrainedTokenizerBase

    def _merge_kwargs(self, **options: object) -> Mapping[str, Any]: ...

    def _process_images(
        self, images: list[Any], **options: object
    ) -> tuple[Mapping[str, Any], list[str]]: ...

    def _get_num_multimodal_tokens(self, image_sizes: list[list[int]]) -> FeatureCounts: ...


class ImageEncoder:
    """Computes the tokens and the arrays of images.

    An image is one tile, or several tiles for a model that splits images. All tiles have arrays of
    one shape. They have equally many features, unless the model omits padding and reads the sizes
    of images.

    Args:
        processor: the processor of the checkpoint.
        placed: whether tokens mention the images. Otherwise an image processor is enough.

    Attributes:
        token: id of the token that a chat template writes for an image; None if tokens mention no
            images.
        feature: id of the placeholder token of an image feature.
        processor: the processor.

    Raises:
        DataError: the processor does not define an image token, or creates no tokens of images.
    """

    noun, part = "image", "image"
    reads: type | tuple[type, ...] = RowImage
    video_token: int | None = None

    def __init__(self, processor: object, *, placed: bool = True) -> None:
        self.processor: Any = processor
        self.token: int | None = None
        self._known: dict[tuple[int, int, bool], MediumTokens] = {}
        self._to_pixels: Any = getattr(processor, "image_processor", processor)
        kind = type(processor).__name__
        if not placed:
            if not callable(self._to_pixels) or not hasattr(self._to_pixels, "size"):
                raise DataError(
                    f"{kind} is no processor of images: pass the AutoProcessor or the "
                    "AutoImageProcessor of the checkpoint"
                )
            return
        for name in ("image_processor", "tokenizer", "_process_images"):
            if not hasattr(processor, name):
                raise DataError(
                    f"{kind} is not a processor of images and text: it has no {name!r}; pass the "
                    "AutoProcessor of a vision-language checkpoint"
                )
        token: object = getattr(processor, "image_token_id", None)
        if isinstance(text := getattr(processor, "image_token", None), str):
            token = self.processor.tokenizer.convert_tokens_to_ids(text)
        if not isinstance(token, int):
            raise DataError(f"{kind} defines no image token: set its image_token")
        self.token = token
        feature_token: object = (getattr(processor, "image_token_ids", None) or [None])[0]
        self.feature = feature_token if isinstance(feature_token, int) else token

    @property
    def marks_prompts(self) -> bool:
        """Whether the model reads token types, which separate the tokens before the first one
        from the others (PaliGemma)."""
        names = getattr(self.processor, "model_input_names", None) or ()
        return self.token is not None and {"token_type_ids", "labels"} <= {*names}

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that the placeholders and pixel values depend on."""
        processor_options = {
            name: value
            for name, value in vars(self.processor).items()
            if isinstance(value, str | int | float | bool | None) and name != "chat_template"
        }
        values = [type(self.processor).__name__, processor_options, self._to_pixels.to_dict()]
        text = json.dumps(values, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the arrays of a tile by name: `pixel_values` [c, h, w], and others."""
        return {name: x.shape[1:] for name, x in get_tiles(self.process_image(BLANK)).items()}

    @cached_property
    def sized(self) -> bool:
        """Whether the model reads the sizes of images."""
        return self.token is not None and SIZES in self.process_image(BLANK)

    def tokens(self, image: RowImage) -> MediumTokens:
        """Return the tokens of an image, which depend on its size.

        Raises:
            DataError: the image cannot be read, or the processor refuses its size.
        """
        if self.token is None:
            return MediumTokens([], 1)
        size = get_size(image)
        key = *size, image.is_single
        if key not in self._known:
            if len(self._known) >= _MAX_SIZES:
                self._known.clear()
            blank = RowImage(np.zeros((*size, 3), np.uint8), image.location, image.is_single)
            self._known[key] = self._tokens(blank)
        return self._known[key]

    def _tokens(self, image: RowImage) -> MediumTokens:
        output, text = self._run(image.source, image)
        tiles = len(next(iter(get_tiles(output).values())))
        ids = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        count = ids.count(self.feature)
        if not count or (count % tiles and SIZES not in output):
            raise DataError(
                f"{image.location}: the processor returned {tiles} tiles and {count} placeholder "
                f"tokens {self.processor.tokenizer.convert_ids_to_tokens(self.feature)!r}; use the "
                "processor and the tokenizer of one checkpoint"
            )
        return MediumTokens(ids, tiles)

    def width(self, rows: Sequence[Sequence[RowImage]]) -> tuple[int, ...]:
        """Return the sizes of the arrays for the images of all rows of a batch.

        The sizes are those of `round_up`, so few programs are compiled.
        """
        tiles = round_up(
            max([1, *(sum(self.tokens(image).tiles for image in row) for row in rows)])
        )
        return (tiles, round_up(max([1, *map(len, rows)]))) if self.sized else (tiles,)

    def arrays(
        self, images: Mapping[int, Sequence[RowImage]], rows: int, width: tuple[int, ...]
    ) -> dict[str, NDArray[Any]]:
        """Return `pixel_values` [b, t, c, h, w], float32, the other arrays of tiles, and
        `image_sizes` and `image_grids` [b, i, 2], int32, of models that read the sizes; padded
        with zeros.

        Args:
            images: number of a row -> the images of the row in order.
            rows: number of rows b.
            width: see `width`.

        Raises:
            DataError: an image cannot be decoded, or its tiles have another shape than others.
        """
        batch: dict[str, NDArray[Any]] = {
            name: np.zeros((rows, width[0], *shape), _dtype(name))
            for name, shape in self.shapes.items()
        }
        if self.sized:
            batch |= {name: np.zeros((rows, width[1], 2), np.int32) for name in (SIZES, GRIDS)}
        for row, row_images in images.items():
            place = 0
            for number, image in enumerate(row_images):
                output = self.process_image(image)
                tiles, count = get_tiles(output), self.tokens(image).tiles
                if self.sized:
                    size = np.asarray(output[SIZES])[0].tolist()
                    batch[SIZES][row, number] = size
                    if count > 1:  # an image of one tile has no grid (LLaVA-OneVision)
                        batch[GRIDS][row, number] = self._grid(size)
                for name, array in tiles.items():
                    if array.shape != (count, *self.shapes[name]):
                        raise DataError(
                            f"{image.location}: the processor returned {name} of shape "
                            f"{array.shape}, but {(count, *self.shapes[name])} is expected; use an "
                            "image processor that resizes or crops all images to one size"
                        )
                    batch[name][row, place : place + count] = array
                place += count
        return batch

    def _grid(self, size: list[int]) -> tuple[int, int]:
        """Return rows and columns of tiles of an image of this height and width."""
        from transformers.image_processing_utils import select_best_resolution

        best = select_best_resolution((size[0], size[1]), self._to_pixels.image_grid_pinpoints)
        _, height, width = self.shapes["pixel_values"]
        return best[0] // height, best[1] // width

    def check(self, image: RowImage) -> None:
        """Decode an image, whose tokens follow from the header alone.

        Raises:
            DataError: the image cannot be decoded.
        """
        if not isinstance(image.source, np.ndarray):
            _decode_image(image)

    def process_image(self, image: RowImage) -> Mapping[str, Any]:
        """Return the output of the image processor for one image.

        Raises:
            DataError: the image cannot be decoded, or the processor refuses the image.
        """
        source = image.source
        if isinstance(source, np.ndarray):
            decoded = np.repeat(source[..., None], 3, axis=2) if source.ndim == 2 else source
        else:
            decoded = _decode_image(image)
        return self._run(decoded, image)[0]

    def _run(self, pixels: object, image: RowImage) -> tuple[Mapping[str, Any], str]:
        """Return the arrays of an image, and the text of its tokens."""
        location = image.location
        if self.token is None:
            return self._to_pixels(images=[pixels], return_tensors="np"), ""
        options = self.processor._merge_kwargs(return_tensors="np")["images_kwargs"]
        images: list[Any] = [pixels]
        returned = getattr(self._to_pixels, "model_input_names", None) or ()
        if not image.is_single and _COUNTS in returned:
            images = [[pixels, NEIGHBOUR]]
        try:
            output, (text, *_) = self.processor._process_images(images, **options)
        except (ValueError, ArithmeticError) as error:
            raise DataError(
                f"{location}: the processor refuses the image: {error}; resize the image, or set "
                "on_error: skip"
            ) from error
        return output, text


def round_up(count: int) -> int:
    """Return the smallest of the numbers 1, 2, 3, 4, 6, 8, 12, 16, … that is at least `count`."""
    power = 1 << (count - 1).bit_length()
    return next(size for size in (3 * power // 4, power) if size >= count)


def get_tiles(output: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Return the arrays of the tiles of one image, [t, ...], in the output of a processor.

    The arrays of the output are [t, c, h, w], or [i, t, c, h, w] and the like, of which the first
    image counts.
    """
    pixel_arrays = {name: np.asarray(x) for name, x in output.items() if name.startswith("pixel_")}
    if pixel_arrays["pixel_values"].ndim == 5:
        pixel_arrays = {name: x[0] for name, x in pixel_arrays.items()}
    return {name: x.astype(_dtype(name)) for name, x in pixel_arrays.items()}


def _dtype(name: str) -> type[np.float32 | np.int32]:
    return np.float32 if name == "pixel_values" else np.int32


def get_size(image: RowImage) -> tuple[int, int]:
    """Return height and width of an image.

    Raises:
        DataError: the image cannot be read.
    """
    source = image.source
    if isinstance(source, np.ndarray):
        return source.shape[0], source.shape[1]
    width, height = _open_image(source, image.location).size
    return height, width


def _decode_image(image: RowImage) -> PIL.Image.Image:
    """Return the first frame of an encoded image in RGB, turned as its EXIF data state."""
    assert not isinstance(image.source, np.ndarray), "pixels are decoded"
    opened = _open_image(image.source, image.location)
    try:
        return opened.convert("RGB")
    except Exception as error:  # decoders raise many types of exceptions for damaged data
        raise _unreadable(image.location, error) from error


def _open_image(
    source: str | bytes | dict[str, Any] | RemoteFile, location: str
) -> PIL.Image.Image:
    """Open an image; its pixels are decoded when they are read."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise DataError(
            "reading images requires the package pillow: install ed-data[images]"
        ) from error
    try:
        raw = read_media(source["bytes"] if isinstance(source, dict) else source, MAX_BYTES)
        opened = Image.open(io.BytesIO(raw))
        if opened.format in _REFUSED_FORMATS:
            raise ValueError(f"the format {opened.format} is not supported")
        if opened.width * opened.height > MAX_PIXELS:
            raise ValueError(
                f"it has {opened.width} x {opened.height} pixels, and the limit is {MAX_PIXELS} "
                "pixels: resize it"
            )
        ImageOps.exif_transpose(opened, in_place=True)
        return opened
    except FileTooLargeError as error:
        raise _unreadable(
            location, ValueError(f"the file has more than {MAX_BYTES} bytes")
        ) from error
    except Exception as error:  # decoders raise many types of exceptions for damaged data
        raise _unreadable(location, error) from error


def _unreadable(location: str, error: Exception) -> DataError:
    # The message of this error is the address of a buffer in memory.
    unknown = type(error).__name__ == "UnidentifiedImageError"
    reason = "its format is unknown" if unknown else error
    return DataError(
        f"{location}: the image cannot be decoded: {reason}; correct the row, or set on_error: skip"
    )
