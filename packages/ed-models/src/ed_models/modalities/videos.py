"""Videos of language models: their frames are images of packed patches among those of a prompt.

The towers of Qwen2-VL and its successors connect the patches of one frame (of a pair of frames that
share patches), so a frame is encoded as an image. `insert_frames` converts the arrays in which
processors of transformers return videos.

Legend: i images of all prompts, v videos, n images and frames, p patches, f numbers of a patch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.inputs import GRID, TIMES
from jaxtyping import Int

from ed_models.body.image_rows import feature_counts
from ed_models.checkpoints.clips import ClipFrames, compute_times
from ed_models.modalities.images import PATCHES, ProcessedImage
from ed_models.modalities.items import Modality
from ed_models.protocol import LanguageModel

#: Arrays of processors: the patches of all videos, their grids [v, 3], and the seconds between the
#: frames of each video, [v].
PIXELS, GRIDS, SECONDS = "pixel_values_videos", "video_grid_thw", "second_per_grid_ts"
#: Images and frames. A frame is placed as an image: the text before the frame states its time
#: (Qwen3-VL).
FRAMES = PATCHES._replace(
    name="frames", video_token="video_token_id", convertible=(PIXELS, GRIDS, SECONDS)
)
#: Images and frames. The frames of a video are placed along time (Qwen2-VL, Qwen2.5-VL).
TIMED_FRAMES = FRAMES._replace(name="timed frames", names=(*PATCHES.names, TIMES))


def split_frames(grids: Int[np.ndarray, "v 3"]) -> Int[np.ndarray, "n 3"]:
    """Return the grid of each frame of videos."""
    frames = np.repeat(grids, grids[:, 0], axis=0)
    frames[:, 0] = 1
    return frames


def process_video(processor: object, clip: ClipFrames, names: Collection[str]) -> ProcessedImage:
    """Return the frames of a video in the form that a model reads, an item for each frame.

    Args:
        processor: the processor of the checkpoint, of `load_processor`.
        clip: the frames that `video_processor.sampling` chooses.
        names: names of the arrays that the model accepts.
    """
    reader = cast(Any, processor)
    output: Mapping[str, Any] = reader.video_processor.convert_frames(clip)
    text: str = reader.replace_video_token(output, 0)
    grids = split_frames(output[GRIDS])
    items: list[dict[str, np.ndarray]] = []
    for pixels, grid, time in zip(
        np.split(output[PIXELS], len(grids)), grids, output[TIMES], strict=True
    ):
        items.append({"pixel_values": pixels, GRID: grid.astype(np.int32)})
        if TIMES in names:
            items[-1][TIMES] = np.asarray(time, np.int32)
    count = text.count(reader.video_token)
    if not count or count % len(items):
        raise ConfigError(f"the processor returned {len(items)} frames of {count} features")
    return ProcessedImage(items, text, count // len(items))


def insert_frames(
    model: LanguageModel, ids: Int[np.ndarray, "b s"], arrays: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the arrays of a processor with the frames of its videos among the images.

    Args:
        model: a model with a modality.
        ids: tokens of the prompts, whose placeholder tokens order images and frames.
        arrays: arrays by name. Without videos they are returned unchanged.

    Returns:
        `pixel_values` [p, f], `image_grid_thw` [n, 3], for `TIMED_FRAMES` `image_times` [n], and
        the other arrays.

    Raises:
        ConfigError: an array is missing, or the numbers of features and placeholder tokens differ.
    """
    modality: Modality = cast(Any, model).modality
    if PIXELS not in arrays and GRIDS not in arrays:
        return arrays if SECONDS not in modality.convertible else _without(arrays, SECONDS)
    if modality.video_token is None:
        raise ConfigError(f"{type(model).__name__} reads no videos: omit {PIXELS} and {GRIDS}")
    if PIXELS not in arrays or GRIDS not in arrays:
        raise ConfigError(f"videos have two arrays, {PIXELS} and {GRIDS}: pass both")
    pixels, grids = np.asarray(arrays[PIXELS]), np.asarray(arrays[GRIDS])
    if pixels.ndim != 2 or grids.ndim != 2 or grids.shape[1] != 3:
        raise ConfigError(
            f"{PIXELS} has shape {list(pixels.shape)} and {GRIDS} {list(grids.shape)}: pass "
            "[patches, numbers] and [videos, 3], as the processor of the checkpoint returns them"
        )
    if not len(grids):
        return _without(arrays, PIXELS, GRIDS, SECONDS)
    config = cast(Any, model.config)
    seconds = np.ones(len(grids)) if arrays.get(SECONDS) is None else np.asarray(arrays[SECONDS])
    rate = getattr(config.vision_config, "tokens_per_second", None)
    times = [
        compute_times(int(grid[0]), each, rate) for grid, each in zip(grids, seconds, strict=True)
    ]
    frame_items = _cut(pixels, split_frames(grids), np.concatenate(times))
    images = np.asarray(arrays.get("pixel_values", np.zeros((0, pixels.shape[1]), np.float32)))
    image_grids = np.asarray(arrays.get(GRID, np.zeros((0, 3), np.int32)))
    items = {
        getattr(config, modality.token): _cut(images, image_grids, np.zeros(len(image_grids), int)),
        getattr(config, modality.video_token): frame_items,
    }
    merge: int = cast(Any, model).patch_form.merge
    ordered = _order(ids, items, merge)
    patches, all_grids, all_times = zip(*ordered, strict=True)
    merged = {"pixel_values": np.concatenate(patches), GRID: np.stack(all_grids).astype(np.int32)}
    if TIMES in modality.names:
        merged[TIMES] = np.array(all_times, np.int32)
    return {**_without(arrays, PIXELS, GRIDS, SECONDS), **merged}


_Item = tuple[np.ndarray, np.ndarray, int]


def _without(arrays: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: array for name, array in arrays.items() if name not in names}


def _cut(pixels: np.ndarray, grids: np.ndarray, times: np.ndarray) -> Iterator[_Item]:
    """Yield the patches, the grid and the time of each image."""
    ends = np.cumsum(grids.prod(axis=1))
    if len(pixels) != (ends[-1] if len(ends) else 0):
        raise ConfigError(
            f"the processor returned {len(pixels)} patches, but the grids {grids.tolist()} have "
            f"{ends[-1] if len(ends) else 0}: pass the arrays of one call of the processor"
        )
    for end, grid, time in zip(ends.tolist(), grids, times.tolist(), strict=True):
        yield pixels[end - int(grid.prod()) : end], grid, time


def _order(
    ids: Int[np.ndarray, "b s"], items: Mapping[int, Iterator[_Item]], merge: int
) -> Iterator[_Item]:
    """Yield the items in the order of their placeholder tokens."""
    tokens = ids[np.isin(ids, list(items))]
    first = 0
    while first < len(tokens):
        token = int(tokens[first])
        item = next(items[token], None)
        if item is None:
            raise ConfigError(
                f"the prompts have more placeholder tokens {token} than features: use the "
                "processor of the checkpoint"
            )
        last = first + int(feature_counts(item[1], merge))
        if not (tokens[first:last] == token).all() or last > len(tokens):
            raise ConfigError(
                f"an image or a frame of {item[1].tolist()} patches has {last - first} features, "
                f"but fewer placeholder tokens {token}: use the processor of the checkpoint"
            )
        yield item
        first = last
    for token, rest in items.items():
        if next(rest, None) is not None:
            raise ConfigError(
                f"the prompts have fewer placeholder tokens {token} than features: use the "
                "processor of the checkpoint"
            )
