"""Images of language models: the layouts in which processors return images and models read them.

Images of one size and tiles have equally many features (`FixedImages`). Grids of tiles without
features of padding have sizes (`TiledImages`). Images of any size are packed patches
(`PackedImages`). `PATCH_LAYOUTS` converts further arrays of processors to packed patches, for
`generate` and for the server.

Legend: b rows, s positions, i images, p patches of an image, f numbers of a patch, t tiles,
c channels, h height, w width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.inputs import COUNTS, GRID, GRIDS, IMAGE_FEATURES, POSITIONS, SIZES, TIMES
from ed_infra.rope.grids import grid_positions
from jaxtyping import Bool, Float, Int

from ed_models.body.image_rows import (
    SMALLEST_BUCKET,
    feature_counts,
    rounded_patches,
    rows_of_images,
)
from ed_models.body.packed_images import PatchForm, from_positions, in_blocks
from ed_models.body.unpadded import TileGrids, rows_of_tiles, with_grids
from ed_models.body.vision import get_height_width
from ed_models.modalities.items import (
    EncoderItems,
    FixedItems,
    ItemArrays,
    Modality,
    PlacedItem,
)
from ed_models.protocol import LanguageModel

if TYPE_CHECKING:
    import PIL.Image

#: Most features of an image of any size. Programs are compiled for images up to this size.
MOST_FEATURES = 16_384
#: Limit of the places of frames along time, which rotary positions of 32 bits can add up.
_MOST_TIME = 2**24
#: Name of the mask of tiles with padding, [b, i, h, w]: 1 for pixels.
MASK = "pixel_attention_mask"


class FixedImages(FixedItems):
    """Images or tiles of images of the size of `vision_config`."""

    def __init__(self, model: LanguageModel, max_model_len: int) -> None:
        modality: Modality = cast(Any, model).modality
        vision = cast(Any, model.config).vision_config
        size = get_height_width(vision.image_size)
        example: dict[str, np.ndarray] = {
            "pixel_values": np.zeros((getattr(vision, "num_channels", 3), *size), np.float32)
        }
        if MASK in modality.names:
            example[MASK] = np.ones(size, np.int32)
        super().__init__(model, example)
        self._other_names = {*modality.names} - {"pixel_values"}

    def batch_rows(
        self, placeholders: Bool[np.ndarray, "b s"], arrays: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """See `EncoderItems.batch_rows`; a processor returns all images, [t, c, h, w]."""
        if SIZES in arrays:
            raise ConfigError(f"the vision tower reads images of one size: omit {SIZES}")
        pixels = arrays.get("pixel_values")
        others = (arrays.get(name) for name in self._other_names)
        if pixels is None or np.ndim(pixels) != 4 or any(array is not None for array in others):
            return arrays
        rows = split_images(np.asarray(pixels), placeholders.sum(axis=1))
        return {**arrays, "pixel_values": rows}


class PackedImages(EncoderItems):
    """Packed patches `pixel_values` [p, f] with `image_grid_thw` [3] of images of any size.

    A frame of a video is an image, which may have its place along time, `image_times`. The patches
    are padded to a power of two of features, so few programs are compiled.
    """

    _required = ("pixel_values", GRID)

    def __init__(
        self, form: PatchForm, features: int, max_model_len: int, *, is_timed: bool = False
    ) -> None:
        self.names = (*self._required, TIMES) if is_timed else self._required
        self.merge, self._numbers, self._form = form.merge, form.numbers, form
        super().__init__(lambda: (min(max_model_len, form.most or MOST_FEATURES), features))
        self.has_axes = form.has_axes

    def examples(self) -> list[ItemArrays]:
        """See `EncoderItems.examples`."""
        sizes, most = (
            [rounded_patches(SMALLEST_BUCKET, self.merge)],
            rounded_patches(self.longest, 1),
        )
        while sizes[-1] < most * self.merge**2:
            sizes.append(2 * sizes[-1])
        grid = np.zeros(3, np.int32)
        return [
            {"pixel_values": np.zeros((size, self._numbers), np.float32), GRID: grid}
            for size in sizes
        ]

    def pad_item(self, arrays: ItemArrays) -> ItemArrays:
        """See `EncoderItems.pad_item`."""
        pixels = np.asarray(arrays["pixel_values"], np.float32)
        size = rounded_patches(len(pixels), self.merge)
        pixels = np.pad(pixels, ((0, size - len(pixels)), (0, 0)))
        return {"pixel_values": pixels, GRID: np.asarray(arrays[GRID], np.int32)}

    def count(self, arrays: ItemArrays) -> int:
        """See `EncoderItems.count`."""
        return len(arrays["pixel_values"]) // self.merge**2

    def check(self, item: PlacedItem) -> str | None:
        """See `EncoderItems.check`."""
        if missing := set(self._required) - set(item.arrays):
            return f"the item has no array {min(missing)}: pass {' and '.join(self._required)}"
        pixels, grid = (np.asarray(item.arrays[name]) for name in self._required)
        time = np.asarray(item.arrays.get(TIMES, 0))
        if time.shape or time.dtype.kind not in "iu" or not 0 <= time < _MOST_TIME:
            return (
                f"image_times is {time.tolist()!r:.80}: pass one integer from 0 to {_MOST_TIME - 1}"
            )
        if grid.shape != (3,) or pixels.shape != (grid.prod(), self._numbers):
            return (
                f"pixel_values has shape {list(pixels.shape)}, and image_grid_thw is "
                f"{grid.tolist()}: pass [patches, {self._numbers}] and the numbers of patches "
                "along time, height and width"
            )
        features = int(feature_counts(grid, self.merge))
        if (grid < 1).any() or (grid[1:] % self.merge).any() or features != item.length:
            return (
                f"an image of {grid.tolist()} patches has {features} features, but the item has "
                f"{item.length} placeholder tokens: repeat the placeholder token for each feature"
            )
        return None

    def gaps(self, arrays: ItemArrays) -> tuple[int, ...]:
        """See `EncoderItems.gaps`."""
        return self._form.gaps(np.asarray(arrays[GRID]))

    def split_items(self, row: ItemArrays) -> Iterator[tuple[ItemArrays, int]]:
        """See `EncoderItems.split_items`."""
        first = 0
        for number, grid in enumerate(row[GRID]):
            last = first + int(grid.prod())
            if last > first:
                arrays = {"pixel_values": row["pixel_values"][first:last], GRID: grid}
                if TIMES in row:
                    arrays[TIMES] = row[TIMES][number]
                yield arrays, int(feature_counts(grid, self.merge))
            first = last

    def positions(self, count: int, items: Sequence[PlacedItem]) -> Int[np.ndarray, "3 s"] | None:
        """See `EncoderItems.positions`."""
        if not (items and self.has_axes):
            return None
        placeholders = np.zeros((1, count), bool)
        for item in items:
            placeholders[0, item.start : item.start + item.length] = True
        grids = np.stack([np.asarray(item.arrays[GRID]) for item in items])
        grids = grids // np.array([1, self.merge, self.merge])
        times = np.array([int(item.arrays.get(TIMES, 0)) for item in items], np.int32)
        segments = np.ones((1, count), np.int32)
        return grid_positions(placeholders, segments, grids[None], times[None])[:, 0]

    def batch_rows(
        self, placeholders: Bool[np.ndarray, "b s"], arrays: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """See `EncoderItems.batch_rows`."""
        packed_arrays = pack_patches(arrays, self._form)
        times, grids = packed_arrays.pop(TIMES, None), packed_arrays.get(GRID)
        rows = rows_of_images(placeholders, packed_arrays, self.merge)
        if times is not None and grids is not None:
            is_image = rows[GRID].prod(axis=2) > 0
            rows[TIMES] = np.zeros(is_image.shape, np.int32)
            rows[TIMES][is_image] = np.asarray(times)[np.asarray(grids).prod(axis=-1) > 0]
        return rows


class TiledImages(EncoderItems):
    """Tiles `pixel_values` [t, c, h, w] of an image, and `image_sizes` [2]: its height and width.

    The tiles are padded to one of the numbers of tiles that the grids of the model have.
    """

    names = ("pixel_values", SIZES)

    def __init__(self, model: LanguageModel, grids: TileGrids) -> None:
        vision, self._grids = model.config.vision_config, grids
        self._tile = vision.num_channels, grids.tile, grids.tile
        longest, features = grids.most(grids.counts[-1]), model.config.text_config.hidden_size
        super().__init__(lambda: (longest, features))

    def examples(self) -> list[ItemArrays]:
        """See `EncoderItems.examples`."""
        none = {SIZES: np.zeros(2, np.int32), GRIDS: np.zeros(2, np.int32)}
        return [
            {"pixel_values": np.zeros((tiles, *self._tile), np.float32), **none}
            for tiles in self._grids.counts
        ]

    def pad_item(self, arrays: ItemArrays) -> ItemArrays:
        """See `EncoderItems.pad_item`."""
        pixels = np.asarray(arrays["pixel_values"], np.float32)
        tiles = next(count for count in self._grids.counts if count >= len(pixels))
        pixels = np.pad(pixels, ((0, tiles - len(pixels)), (0, 0), (0, 0), (0, 0)))
        without_grid = self._grids.may_be_whole and tiles == 1
        grid_arrays = {GRIDS: np.zeros(2, np.int32)} if without_grid else {}
        size = np.asarray(arrays[SIZES], np.int32)
        return with_grids(self._grids, {"pixel_values": pixels, SIZES: size, **grid_arrays})

    def count(self, arrays: ItemArrays) -> int:
        """See `EncoderItems.count`."""
        return self._grids.most(len(arrays["pixel_values"]))

    def check(self, item: PlacedItem) -> str | None:
        """See `EncoderItems.check`."""
        if missing := set(self.names) - set(item.arrays):
            return f"the item has no array {min(missing)}: pass {' and '.join(self.names)}"
        pixels, size = (np.asarray(item.arrays[name]) for name in self.names)
        if size.shape != (2,) or (size < 1).any() or pixels.shape[1:] != self._tile:
            return (
                f"pixel_values has shape {list(pixels.shape)}, and image_sizes is {size.tolist()}: "
                f"pass [tiles, {', '.join(map(str, self._tile))}] and the height and width of the "
                "image"
            )
        without_grid = self._grids.may_be_whole and len(pixels) == 1
        tiles, features = self._grids.sizes(int(size[0]), int(size[1]), without_grid=without_grid)
        if (len(pixels), item.length) != (tiles, features):
            return (
                f"an image of {size.tolist()} pixels has {tiles} tiles and {features} features, "
                f"but the item has {len(pixels)} tiles and {item.length} placeholder tokens: use "
                "the processor of the checkpoint"
            )
        return None

    def split_items(self, row: ItemArrays) -> Iterator[tuple[ItemArrays, int]]:
        """See `EncoderItems.split_items`."""
        first = 0
        for size, grid in zip(row[SIZES], with_grids(self._grids, row)[GRIDS], strict=True):
            if size.any():
                without_grid = not grid.any()
                tiles, features = self._grids.sizes(
                    int(size[0]), int(size[1]), without_grid=without_grid
                )
                pixels = row["pixel_values"][first : first + tiles]
                yield {"pixel_values": pixels, SIZES: size}, features
                first += tiles

    def batch_rows(
        self, placeholders: Bool[np.ndarray, "b s"], arrays: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """See `EncoderItems.batch_rows`."""
        return rows_of_tiles(self._grids, placeholders, arrays)


def _build_tiles(model: LanguageModel, max_model_len: int) -> EncoderItems:
    return TiledImages(model, cast(Any, model).model.grids)


def _build_patches(model: LanguageModel, max_model_len: int) -> EncoderItems:
    body = cast(Any, model).model
    form: PatchForm | None = body.patch_form
    if form is None:
        return FixedImages(model, max_model_len)
    is_timed = TIMES in cast(Any, model).modality.names
    return PackedImages(form, body.encoded_features, max_model_len, is_timed=is_timed)


#: Array of processors that states which tokens are those of images.
_TYPES = "mm_token_type_ids"
#: Images, or tiles of images, of one size.
TILES = Modality(
    "tiles",
    "images",
    "image_token_id",
    ("pixel_values",),
    FixedImages,
    features=IMAGE_FEATURES,
    unread=(_TYPES,),
)
#: Tiles with padding inside.
MASKED_TILES = TILES._replace(name="masked tiles", names=("pixel_values", MASK))
#: Grids of tiles without features of padding (LLaVA-NeXT).
GRID_TILES = TILES._replace(
    name="grid tiles",
    names=("pixel_values", SIZES, GRIDS),
    build=_build_tiles,
    unread=(_TYPES, COUNTS),
)
#: Packed patches, in which those of a block are neighbors (Qwen2-VL).
PATCHES = TILES._replace(name="packed patches", names=("pixel_values", GRID), build=_build_patches)
#: Packed patches of a processor that returns them row by row (Kimi K2.5).
RASTER_PATCHES = PATCHES._replace(name="raster patches")
#: Packed patches of a processor that returns padded images; a token ends each row (Pixtral). With
#: another vision tower, images of one size.
ROWS = PATCHES._replace(name="rows", convertible=(SIZES,))
#: Packed patches of a processor that returns padded patches with their places (Gemma 4).
PLACES = PATCHES._replace(name="places", convertible=(POSITIONS,))


class PatchLayout(NamedTuple):
    """A form in which processors of transformers return images of any size.

    Attributes:
        read_form: returns the form of the patches of a processor; None = the processor returns no
            patches.
        pack: returns the patches [p, f] and the grids [i, 3] of images from `pixel_values`, the
            array that marks the layout, and the form. Packed patches are returned unchanged.
    """

    read_form: Callable[[Any], PatchForm | None]
    pack: Callable[[np.ndarray, np.ndarray, PatchForm], tuple[np.ndarray, np.ndarray]]


def _order_raster(
    pixels: np.ndarray, grids: np.ndarray, form: PatchForm
) -> tuple[np.ndarray, np.ndarray]:
    if pixels.ndim != 4:  # [p, f]: the patches of a block are neighbors
        return pixels, grids
    return in_blocks(pixels.reshape(len(pixels), -1), grids, form.merge), grids


#: Array beside `pixel_values` -> the layout of a processor that returns the array.
PATCH_LAYOUTS: Mapping[str, PatchLayout] = {
    GRID: PatchLayout(
        lambda processor: PatchForm(1, 3, getattr(processor.image_processor, "merge_size", 1)),
        _order_raster,
    ),
    SIZES: PatchLayout(
        lambda processor: (
            None
            if getattr(processor, "image_break_token_id", None) is None
            else PatchForm(processor.patch_size, 3, processor.spatial_merge_size)
        ),
        lambda pixels, sizes, form: form.pack_images(pixels, sizes),
    ),
    POSITIONS: PatchLayout(
        lambda processor: PatchForm(1, 3, processor.image_processor.pooling_kernel_size),
        lambda pixels, places, form: from_positions(pixels, places, form.merge),
    ),
}


def pack_patches(arrays: Mapping[str, Any], form: PatchForm) -> dict[str, Any]:
    """Return the arrays of images of any size as packed patches; see `PATCH_LAYOUTS`.

    Args:
        arrays: the arrays of a processor. Packed patches and other arrays are returned unchanged.
        form: the patches.
    """
    packed_arrays = dict(arrays)
    for mark, layout in PATCH_LAYOUTS.items():
        if "pixel_values" in arrays and arrays.get(mark) is not None:
            pixels, marks = np.asarray(arrays["pixel_values"]), np.asarray(packed_arrays.pop(mark))
            patches, grids = layout.pack(pixels, marks, form)
            packed_arrays |= {"pixel_values": patches, GRID: grids}
    return packed_arrays


def split_images(
    pixels: Float[np.ndarray, "t c h w"], tokens: Int[np.ndarray, " b"]
) -> Float[np.ndarray, "b i c h w"]:
    """Assign images to prompts by their image tokens; rows with fewer images end with zeros.

    Args:
        pixels: images of all prompts, in the order of the prompts.
        tokens: number of image tokens of each prompt.

    Raises:
        ConfigError: the prompts have no equal number of image tokens for each image.
    """
    per_image = int(tokens.sum()) // max(1, len(pixels))
    counts = tokens // max(1, per_image)
    if not per_image or (counts * per_image != tokens).any() or counts.sum() != len(pixels):
        raise ConfigError(
            f"pixel_values has {len(pixels)} images, and the prompts have {tokens.tolist()} image "
            "tokens: pass as many tokens for each image as the processor of the checkpoint does, "
            "or an array [rows, images, channels, height, width]"
        )
    rows = np.zeros((len(tokens), int(counts.max()), *pixels.shape[1:]), pixels.dtype)
    first = 0
    for row, count in zip(rows, counts.tolist(), strict=True):
        row[:count] = pixels[first : first + count]
        first += count
    return rows


class TokenNames(Protocol):
    """The part of a tokenizer that names the placeholder token of a feature."""

    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...

    def convert_ids_to_tokens(self, ids: int) -> str: ...


class ImageTextProcessor(Protocol):
    """The processor of a vision-language checkpoint (`transformers.AutoProcessor`).

    Attributes:
        image_token: the text that a chat template writes for an image.
    """

    image_token: str
    tokenizer: TokenNames

    def _merge_kwargs(self, **options: object) -> Mapping[str, Any]: ...

    def _process_images(
        self, images: list[Any], **options: object
    ) -> tuple[Mapping[str, Any], list[str]]: ...


class ProcessedImage(NamedTuple):
    """An image in the form that a model reads.

    Attributes:
        items: the arrays of each item of the encoder: of each tile, or of the image.
        text: the text of the tokens of the image.
        features: number of features of an item.
    """

    items: list[dict[str, np.ndarray]]
    text: str
    features: int


def process_image(
    processor: ImageTextProcessor,
    image: PIL.Image.Image,
    names: Collection[str],
    *,
    is_single: bool,
) -> ProcessedImage:
    """Return an image in the form that a model reads.

    Args:
        processor: the processor of the checkpoint (`transformers.AutoProcessor`).
        image: the decoded image.
        names: names of the arrays that the model accepts.
        is_single: whether the text has no other image.

    Raises:
        ConfigError: the numbers of tiles and of features contradict each other. Processors may
            raise any exception for an unusual size.
    """
    images: list[Any] = [image]
    image_processor = getattr(processor, "image_processor", None)
    # A processor may split an image into tiles only if its text has no other image.
    if not is_single and COUNTS in (getattr(image_processor, "model_input_names", None) or ()):
        images = [[image, image.resize((2, 2))]]
    options = processor._merge_kwargs(return_tensors="np")["images_kwargs"]
    output, (text, *_) = processor._process_images(images, **options)
    arrays = {
        name: np.asarray(output[name])
        for name in names
        if name.startswith(("pixel_", "image_")) and name in output
    }
    forms = [
        layout.read_form(processor) for mark, layout in PATCH_LAYOUTS.items() if mark in arrays
    ]
    for form in filter(None, forms):
        arrays = pack_patches(arrays, form)
    items = _split_image(arrays)
    if (token := get_feature_token(processor)) is None:
        raise ConfigError(f"the tokenizer has no token {processor.image_token!r}")
    count = text.count(processor.tokenizer.convert_ids_to_tokens(token))
    if not count or count % len(items):
        raise ConfigError(f"the processor returned {len(items)} tiles of {count} features")
    return ProcessedImage(items, text, count // len(items))


def get_feature_token(processor: ImageTextProcessor) -> int | None:
    """Return the id of the placeholder token of a feature."""
    tokens = getattr(processor, "image_token_ids", None) or [None]
    if tokens[0] is not None:
        return tokens[0]
    return processor.tokenizer.convert_tokens_to_ids(processor.image_token)


def get_tokens_of_image(processor: ImageTextProcessor) -> set[int]:
    """Return the tokens from the first to the last feature of an image."""
    tokens = get_feature_token(processor), getattr(processor, "image_break_token_id", None)
    return {token for token in tokens if token is not None}


def _split_image(arrays: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Return the arrays of each item of one image, in the output of an image processor.

    The arrays are [t, c, h, w] or [1, t, c, h, w] and the like, for t tiles. Packed patches [p, f]
    with `image_grid_thw` [1, 3], and tiles with `image_sizes` [i, 2], are one item; of several
    images with sizes, the first counts.
    """
    arrays = {**arrays, "pixel_values": arrays["pixel_values"].astype(np.float32)}
    pixels = arrays["pixel_values"]
    if GRID in arrays:
        (grid,) = arrays[GRID]
        return [{"pixel_values": pixels, GRID: grid.astype(np.int32)}]
    if SIZES in arrays:
        return [{"pixel_values": pixels[0], SIZES: arrays[SIZES][0].astype(np.int32)}]
    if pixels.ndim == 5:
        arrays = {name: array[0] for name, array in arrays.items()}
    return [
        {name: array[tile] for name, array in arrays.items()}
        for tile in range(len(arrays["pixel_values"]))
    ]
