"""Images of different sizes for vision-language models: placeholder tokens and packed patches.

Legend: b rows, i images of a row, p patches of a row, q patches of an image with padding, f numbers
of a patch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ed_data.errors import DataError
from ed_data.rows.example import RowImage, RowVideo
from ed_data.tokens.images import BLANK, ImageEncoder, get_size
from ed_data.tokens.items import MediumTokens
from ed_data.tokens.videos import IMAGE_TIMES, VideoEncoder, VideoSize

GRID, PLACES = "image_grid_thw", "image_position_ids"
#: Largest number of images whose sizes are kept, and smallest number of features of a row.
_KEPT, _SMALLEST = 2**17, 16


class PatchCounts(NamedTuple):
    """Numbers of placeholder tokens and of patches of an image."""

    tokens: int
    patches: int


class PatchEncoder(ImageEncoder):
    """Counts the features of images, and packs the patches of the images of a row.

    The image processor returns `pixel_values` [p, f], the patches of an image, and
    `image_grid_thw` [1, 3], their numbers along time, height and width. A frame of a video is an
    image with one of the tokens of its video.
    """

    def __init__(self, processor: object) -> None:
        super().__init__(processor)
        self._counts: dict[str, PatchCounts] = {}
        self.videos = VideoEncoder(processor) if VideoEncoder.fits(processor) else None
        if self.videos is not None:
            self.reads, self.video_token = (RowImage, RowVideo), self.videos.token

    @cached_property
    def fingerprint(self) -> str:
        """See `ImageEncoder.fingerprint`."""
        if self.videos is None:
            return super().fingerprint
        text = json.dumps([super().fingerprint, self.videos.fingerprint], default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @staticmethod
    def fits(processor: object) -> bool:
        """Return whether the image processor of a processor returns packed patches."""
        images = getattr(processor, "image_processor", None)
        return GRID in (getattr(images, "model_input_names", None) or ())

    @cached_property
    def numbers(self) -> int:
        """Number of numbers of a patch, f."""
        return self.pack_patches(self.process_image(BLANK))[0].shape[-1]

    def pack_patches(self, output: Mapping[str, Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the patches [p, f] and the grid [3] of an image in the output of the processor.

        Kimi K2.5 has patches [p, c, s, s], row by row.
        """
        (grid,) = np.asarray(output[GRID])
        patches = np.asarray(output["pixel_values"], np.float32)
        if patches.ndim == 2:  # the patches of a block are neighbors
            return patches, grid
        (t, h, w), m = grid, int(self._to_pixels.merge_size)
        blocks = patches.reshape(t, h // m, m, w // m, m, -1).swapaxes(2, 3)
        return blocks.reshape(len(patches), -1), grid

    def counts(self, image: RowImage) -> PatchCounts:
        """Return the numbers of tokens and patches of an image, from its size.

        Raises:
            DataError: the image cannot be read, or the processor refuses its size.
        """
        stored_counts = self._counts.get(image.location)
        if stored_counts is not None:
            return stored_counts
        height, width = get_size(image)
        try:
            processor_counts = self.processor._get_num_multimodal_tokens(
                image_sizes=[[height, width]]
            )
        except ValueError as error:
            raise DataError(
                f"{image.location}: the processor refuses an image of {width} x {height} pixels: "
                f"{error}; resize the image, or set on_error: skip"
            ) from error
        counts = PatchCounts(
            int(processor_counts.num_image_tokens[0]), int(processor_counts.num_image_patches[0])
        )
        if len(self._counts) >= _KEPT:
            self._counts.clear()
        self._counts[image.location] = counts
        return counts

    def measure_frames(self, video: RowVideo) -> VideoSize:
        """Return the tokens and the frames of a video. Raises DataError."""
        assert self.videos is not None, "the encoder reads videos"
        return self.videos.measure(video)

    def check(self, image: RowImage | RowVideo) -> None:
        """Decode a medium. Raises DataError."""
        if isinstance(image, RowVideo):
            self.pack_video(image)
        else:
            super().check(image)

    def pack_video(self, video: RowVideo) -> NDArray[Any]:
        """Return the patches of a video, [p, f]. Raises DataError."""
        assert self.videos is not None, "the encoder reads videos"
        return self.videos.pack_patches(video)

    def tokens(self, image: RowImage | RowVideo) -> MediumTokens:
        """Return one placeholder token for each feature of an image, or the tokens of a video."""
        assert self.token is not None
        if isinstance(image, RowVideo):
            video = self.measure_frames(image)
            return MediumTokens(video.tokens, len(video.grids))
        return MediumTokens([self.token] * self.counts(image).tokens, 1)

    def width(self, rows: Sequence[Sequence[RowImage | RowVideo]]) -> tuple[int, ...]:
        """Return the buckets of patches and of images of a row, for the rows of a whole batch.

        A bucket is a power of two of features or images, so few programs are compiled.
        """
        features, merge, most = _SMALLEST, 1, 1
        for media in rows:
            sizes = [self._measure_medium(medium) for medium in media]
            features = max(features, sum(count.tokens for count, _ in sizes))
            merge = max([merge, *(count.patches // count.tokens for count, _ in sizes)])
            most = max(most, sum(images for _, images in sizes))
        return _round_up(features) * merge, _round_up(most)

    def arrays(
        self,
        images: Mapping[int, Sequence[RowImage | RowVideo]],
        rows: int,
        width: tuple[int, ...],
    ) -> dict[str, NDArray[Any]]:
        """Return `pixel_values` [b, p, f] and `image_grid_thw` [b, i, 3], padded with zeros, and
        `image_times` [b, i] of a model that places frames along time.

        Raises:
            DataError: the processor returned another number of patches than it counted.
        """
        patches, most = width
        pixels = np.zeros((rows, patches, self.numbers), np.float32)
        grids, times = np.zeros((rows, most, 3), np.int32), np.zeros((rows, most), np.int32)
        for row, row_images in images.items():
            filled = place = 0
            for medium in row_images:
                medium_patches, medium_grids, medium_times = self._pack_medium(medium)
                last = filled + len(medium_patches)
                pixels[row, filled:last], filled = medium_patches, last
                last = place + len(medium_grids)
                grids[row, place:last], times[row, place:last] = medium_grids, medium_times
                place = last
        is_timed = self.videos is not None and self.videos.is_timed
        return {"pixel_values": pixels, GRID: grids} | ({IMAGE_TIMES: times} if is_timed else {})

    def _measure_medium(self, medium: RowImage | RowVideo) -> tuple[PatchCounts, int]:
        """Return the numbers of features and patches of a medium, and of its images or frames."""
        if isinstance(medium, RowImage):
            return self.counts(medium), 1
        video = self.measure_frames(medium)
        return PatchCounts(video.features, video.patches), len(video.grids)

    def _pack_medium(
        self, medium: RowImage | RowVideo
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return the patches, the grids [n, 3] and the times [n] of an image or of frames."""
        if isinstance(medium, RowVideo):
            video = self.measure_frames(medium)
            patches, grids, times = self.pack_video(medium), video.grids, video.times
            count = video.patches
        else:
            count = self.counts(medium).patches
            patches, grid = self.pack_patches(self.process_image(medium))
            grids, times = grid[None], np.zeros(1, np.int32)
        if len(patches) != count or grids.prod(axis=1).sum() != count:
            raise DataError(
                f"{medium.location}: the processor counted {count} patches, but returned "
                f"{len(patches)} with the grids {grids.tolist()}: use the processor and the image "
                "processor of one checkpoint"
            )
        return patches, grids, times


class PlacedEncoder(PatchEncoder):
    """Packs the patches of images of a processor that returns the place of each patch (Gemma 4).

    The image processor returns `pixel_values` [1, q, f], the patches of an image row by row and
    padding, and `image_position_ids` [1, q, 2], the column and row of each patch or -1. An image
    has one token for each square block of patches, between two further tokens.
    """

    @staticmethod
    def fits(processor: object) -> bool:
        """Return whether the image processor of a processor returns places of patches."""
        images = getattr(processor, "image_processor", None)
        return PLACES in (getattr(images, "model_input_names", None) or ())

    @property
    def _merge(self) -> int:
        return int(self._to_pixels.pooling_kernel_size)

    def counts(self, image: RowImage) -> PatchCounts:
        """Return the numbers of tokens and patches of an image, from its size."""
        tokens = super().counts(image).tokens
        return PatchCounts(tokens, tokens * self._merge**2)

    def tokens(self, image: RowImage | RowVideo) -> MediumTokens:
        """Return the tokens of an image."""
        assert isinstance(image, RowImage), "the processor reads no videos"
        count = {"num_soft_tokens_per_image": [self.counts(image).tokens]}
        text = self.processor.replace_image_token(count, 0)
        return MediumTokens(
            self.processor.tokenizer(text, add_special_tokens=False)["input_ids"], 1
        )

    def pack_patches(self, output: Mapping[str, Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the patches and the grid; the patches of a block are neighbors."""
        (places,), m = np.asarray(output[PLACES]), self._merge
        columns, rows = (places.max(axis=0) + 1).tolist()
        patches = np.asarray(output["pixel_values"], np.float32)[0][places[:, 0] >= 0]
        blocks = patches.reshape(rows // m, m, columns // m, m, -1).swapaxes(1, 2)
        return blocks.reshape(len(patches), -1), np.array([1, rows, columns], np.int32)


class RowEncoder(PatchEncoder):
    """Packs the patches of images of a processor that returns images and their sizes (Pixtral).

    The image processor returns `pixel_values` [1, c, h, w] and `image_sizes` [1, 2]. An image has
    one token for each square block of patches, a break token after each row, and an end token
    instead of the last break token; LightOnOCR has only the tokens of the blocks.
    """

    def __init__(self, processor: object) -> None:
        super().__init__(processor)
        self._side: int = self.processor.patch_size
        self._merge: int = self.processor.spatial_merge_size

    @cached_property
    def _ends_rows(self) -> bool:
        """Whether a token without a feature ends each row of features."""
        block = self._side * self._merge
        text = self.processor.replace_image_token({"image_sizes": [(2 * block, block)]}, 0)
        return self.processor.image_break_token in text

    @staticmethod
    def fits(processor: object) -> bool:
        """Return whether a processor knows a token that ends rows of features."""
        return isinstance(getattr(processor, "image_break_token_id", None), int)

    def rows_and_columns(self, image: RowImage) -> tuple[int, int]:
        """Return the numbers of rows and columns of features of an image, from its size.

        Raises:
            DataError: the image cannot be read, or has no feature.
        """
        from transformers.models.pixtral.image_processing_pil_pixtral import (
            get_resize_output_image_size,
        )

        edge, block = int(self._to_pixels.size["longest_edge"]), self._side * self._merge
        size = get_size(image)
        blank = np.broadcast_to(np.uint8(0), (*size, 3))
        height, width = get_resize_output_image_size(blank, edge, block)
        if not height or not width:
            raise DataError(
                f"{image.location}: the processor refuses an image of {size[1]} x {size[0]} "
                "pixels: "
                f"with {edge} pixels along its longer side, the other side has none; resize the "
                "image, or set on_error: skip"
            )
        return height // block, width // block

    def counts(self, image: RowImage) -> PatchCounts:
        """Return the numbers of features and patches of an image, from its size."""
        rows, columns = self.rows_and_columns(image)
        return PatchCounts(rows * columns, rows * columns * self._merge**2)

    def tokens(self, image: RowImage | RowVideo) -> MediumTokens:
        """Return the tokens of the rows of features of an image."""
        assert isinstance(image, RowImage), "the processor reads no videos"
        rows, columns = self.rows_and_columns(image)
        processor = self.processor
        if not self._ends_rows:
            return MediumTokens([processor.image_token_id] * rows * columns, 1)
        ids = ([processor.image_token_id] * columns + [processor.image_break_token_id]) * rows
        return MediumTokens([*ids[:-1], processor.image_end_token_id], 1)

    def pack_patches(self, output: Mapping[str, Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the patches and the grid; the patches of a block are neighbors."""
        (pixels,), s, m = np.asarray(output["pixel_values"], np.float32), self._side, self._merge
        channels, height, width = pixels.shape
        rows, columns = height // (s * m), width // (s * m)
        x = pixels.reshape(channels, rows, m, s, columns, m, s).transpose(1, 4, 2, 5, 0, 3, 6)
        grid = np.array([1, rows * m, columns * m], np.int32)
        return x.reshape(-1, channels * s * s), grid


def _round_up(count: int) -> int:
    """Round up to a power of two."""
    return 1 << (count - 1).bit_length()
