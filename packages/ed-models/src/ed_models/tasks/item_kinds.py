"""The kinds of items of encoders: images of one size, packed patches of images of any size, and the
tiles of images without features of padding.

Legend: p patches of an image, f numbers of a patch, t tiles, c channels, h height, w width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import jax
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.inputs import GRID, GRIDS, SIZES, SOUND
from ed_infra.rope.grids import grid_positions
from flax import nnx
from jaxtyping import Int

from ed_models.body.image_rows import SMALLEST, feature_counts, rounded_patches
from ed_models.body.packed_images import PatchForm
from ed_models.body.unpadded import TileGrids, with_grids
from ed_models.body.vision import get_size
from ed_models.generation.prompts import is_encoder_decoder
from ed_models.protocol import LanguageModel
from ed_models.tasks.audio_text import RecordingForm
from ed_models.tasks.encoder_items import (
    EncoderItems,
    ItemArrays,
    PlacedItem,
    batch_of_one,
    encoder_names,
)
from ed_models.tasks.packed_image_text import PackedImageTextLM
from ed_models.tasks.patched_image_text import PatchedImageTextLM

#: Most features of an image of any size. Programs are compiled for images up to this size.
MOST_FEATURES = 16_384


def build_encoder_items(model: LanguageModel, max_model_len: int) -> EncoderItems | None:
    """Return the items of a model's encoder; None without an encoder.

    Args:
        model: the served model.
        max_model_len: maximum number of tokens of a sequence.

    Raises:
        ConfigError: the shape of an array is unknown.
    """
    if is_encoder_decoder(model) or not encoder_names(model):
        return None
    if isinstance(model, PatchedImageTextLM | PackedImageTextLM) and model.patch_form is not None:
        return PackedImages(model.patch_form, model.encoded_features, max_model_len)
    grids = getattr(model, "grids", None)
    return FixedItems(model) if grids is None else TiledImages(model, grids)


class FixedItems:
    """Images or tiles of images of the size of `vision_config`, or spectrograms of recordings of
    the length of `audio_config`."""

    has_axes = False

    def __init__(self, model: LanguageModel) -> None:
        # Only towers for packed patches read grids and sizes.
        self.names = tuple(n for n in encoder_names(model) if n not in (GRID, SIZES))
        example_arrays: dict[str, np.ndarray] = {}
        if (vision := getattr(model.config, "vision_config", None)) is not None:
            size = get_size(vision.image_size)
            pixels = np.zeros((getattr(vision, "num_channels", 3), *size), np.float32)
            example_arrays = {
                "pixel_values": pixels,
                "pixel_attention_mask": np.ones(size, np.int32),
            }
        if (audio := getattr(model.config, "audio_config", None)) is not None:
            shape = audio.num_mel_bins, 2 * audio.max_source_positions
            example_arrays["input_features"] = np.zeros(shape, np.float32)
            example_arrays[SOUND] = np.ones(shape[1], np.int32)
        if not example_arrays.keys() >= set(self.names):
            raise ConfigError(f"the encoder inputs {self.names} have no known shape")
        self._example = {name: example_arrays[name] for name in self.names}
        self._form: RecordingForm | None = getattr(model, "recording_form", None)
        # Without devices: nothing is computed.
        graphdef, state = nnx.split(cast(nnx.Module, model))
        inputs = batch_of_one(self.examples()[0])

        def embeddings(state: nnx.State) -> jax.Array:
            return cast(LanguageModel, nnx.merge(graphdef, state)).encode(inputs).embeddings

        _, self.longest, self.features = jax.eval_shape(embeddings, state).shape

    def examples(self) -> list[ItemArrays]:
        """See `EncoderItems.examples`."""
        return [self._example]

    def pad_item(self, arrays: ItemArrays) -> ItemArrays:
        """Return the arrays; an image without a mask has no padding."""
        return {**self._example, **arrays}

    def count(self, arrays: ItemArrays) -> int:
        """See `EncoderItems.count`."""
        return self.longest

    def check(self, item: PlacedItem) -> str | None:
        """See `EncoderItems.check`."""
        length = self._length(item.arrays)
        if item.length == length:
            return None
        return (
            f"the encoder returns {length} positions, but the item has {item.length} "
            "placeholder tokens: repeat the placeholder token for each position"
        )

    def _length(self, arrays: ItemArrays) -> int:
        """Return the number of features of an item: of a recording, those of its sound."""
        if SOUND not in arrays:
            return self.longest
        assert self._form is not None, "only audio-language models read masks of sound"
        return self._form.features(int(np.sum(np.asarray(arrays[SOUND]) != 0)))

    def gaps(self, arrays: ItemArrays) -> tuple[int, ...]:
        """Return (): nothing separates the placeholder tokens of an item."""
        return ()

    def split_items(self, row: ItemArrays) -> Iterator[tuple[ItemArrays, int]]:
        """See `EncoderItems.split_items`."""
        for number in range(len(row[self.names[0]])):
            arrays = {name: row[name][number] for name in self.names}
            if length := self._length(arrays):
                yield arrays, length

    def positions(self, count: int, items: Sequence[PlacedItem]) -> None:
        """Return None."""


class PackedImages:
    """Packed patches `pixel_values` [p, f] with `image_grid_thw` [3] of images of any size.

    The patches are padded to a power of two of features, so few programs are compiled.
    """

    names: tuple[str, ...] = ("pixel_values", GRID)

    def __init__(self, form: PatchForm, features: int, max_model_len: int) -> None:
        self.merge, self._numbers, self._form = form.merge, form.numbers, form
        self.has_axes, self.features = form.has_axes, features
        self.longest = min(max_model_len, form.most or MOST_FEATURES)

    def examples(self) -> list[ItemArrays]:
        """See `EncoderItems.examples`."""
        sizes, most = [rounded_patches(SMALLEST, self.merge)], rounded_patches(self.longest, 1)
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
        if missing := set(self.names) - set(item.arrays):
            return f"the item has no array {min(missing)}: pass {' and '.join(self.names)}"
        pixels, grid = (np.asarray(item.arrays[name]) for name in self.names)
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
        for grid in row[GRID]:
            last = first + int(grid.prod())
            if last > first:
                arrays = {"pixel_values": row["pixel_values"][first:last], GRID: grid}
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
        return grid_positions(placeholders, np.ones((1, count), np.int32), grids[None])[:, 0]


class TiledImages:
    """Tiles `pixel_values` [t, c, h, w] of an image, and `image_sizes` [2]: its height and width.

    The tiles are padded to one of the numbers of tiles that the grids of the model have.
    """

    names: tuple[str, ...] = ("pixel_values", SIZES)
    has_axes = False

    def __init__(self, model: LanguageModel, grids: TileGrids) -> None:
        vision, self._grids = model.config.vision_config, grids
        self._tile = vision.num_channels, grids.tile, grids.tile
        self.longest = grids.most(grids.counts[-1])
        self.features = model.config.text_config.hidden_size

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

    def gaps(self, arrays: ItemArrays) -> tuple[int, ...]:
        """Return (): nothing separates the placeholder tokens of an item."""
        return ()

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

    def positions(self, count: int, items: Sequence[PlacedItem]) -> None:
        """Return None."""
