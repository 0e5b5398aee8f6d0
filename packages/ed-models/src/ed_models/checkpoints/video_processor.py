"""The video processors of Qwen2-VL and Qwen3-VL for environments without torchvision.

The processors of transformers import torchvision. The classes here have the same names, settings,
rules and output, so `save_pretrained` writes the same files. PIL resizes frames, so pixels of a
resized video differ in rounding.

Legend: v videos, p patches, f numbers of a patch, n frames, h height, w width.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from ed_infra.errors import ConfigError
from transformers.image_processing_base import BatchFeature
from transformers.image_utils import (
    IMAGENET_STANDARD_MEAN,
    IMAGENET_STANDARD_STD,
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
    PILImageResampling,
)
from transformers.processing_utils import VideosKwargs
from transformers.video_processing_utils import VideoProcessorMixin
from transformers.video_utils import VideoMetadata

from ed_models.checkpoints.clips import (
    ClipFacts,
    ClipFrames,
    ClipLimits,
    ClipPlan,
    ClipSource,
    Pictures,
    Sampling,
    compute_times,
    open_clip,
    read_clip,
    resize_frame,
)

#: Frames, a file, a list of pictures, or frames that `ClipProcessor.read` returned.
Video = np.ndarray | ClipFrames | ClipSource


class ClipsKwargs(VideosKwargs, total=False):
    """Options of a call and settings of a checkpoint; see `Sampling`."""

    min_pixels: int
    max_pixels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_frames: int
    max_frames: int
    cap_pixels_per_frame: bool
    max_video_tokens: int


class ClipProcessor(VideoProcessorMixin):
    """Converts videos to packed patches `pixel_values_videos` [p, f] and `video_grid_thw` [v, 3].

    Attributes:
        whole: see `Sampling`.
    """

    whole = False
    size: dict[str, int]
    patch_size: int
    image_mean: list[float]
    image_std: list[float]
    resample = PILImageResampling.BICUBIC
    do_resize = True
    do_rescale = True
    do_normalize = True
    do_convert_rgb = True
    do_sample_frames = False
    rescale_factor = 1 / 255
    temporal_patch_size = 2
    merge_size = 2
    min_frames = 4
    max_frames = 768
    num_frames = None
    fps = None
    cap_pixels_per_frame = None
    valid_kwargs = ClipsKwargs
    model_input_names = ["pixel_values_videos", "video_grid_thw"]  # noqa: RUF012

    def __init__(self, **options: object) -> None:
        if options.get("do_resize") is False or options.get("resample", 3) not in (None, 3):
            raise ConfigError(
                f"do_resize={options.get('do_resize', True)} and resample="
                f"{options.get('resample', 3)} are not supported: videos are resized with a "
                "bicubic kernel (do_resize=true, resample=3)"
            )
        size = dict(cast(Mapping[str, Any], options.pop("size", None) or type(self).size))
        for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            pixels = options.pop(name, None)
            if pixels is not None and not self.whole:
                size[edge] = pixels
        defaults = {
            name: copy.deepcopy(getattr(type(self), name))
            for name in (*ClipsKwargs.__annotations__, *VideosKwargs.__annotations__)
            if hasattr(type(self), name)
        }
        settings = {**defaults, **options, "size": size}
        super().__init__(**cast(dict[str, Any], settings))
        self._tokens_per_second: float | None = None

    def set_rate(self, tokens_per_second: float | None) -> None:
        """Set the positions along time of a second of a model; None = a frame has one position."""
        self._tokens_per_second = tokens_per_second

    @property
    def sampling(self) -> Sampling:
        """The rule for frames and sizes."""
        return self._get_sampling({})

    def _get_sampling(self, options: Mapping[str, Any]) -> Sampling:
        given = {name: value for name, value in options.items() if value is not None}
        size = dict(given.get("size") or self.size)
        merged = {**vars(self), **given}
        return Sampling.from_options(
            {
                **{name: value for name, value in merged.items() if value is not None},
                **{edge: int(size[edge]) for edge in ("shortest_edge", "longest_edge")},
                "whole": self.whole,
            }
        )

    def read(
        self,
        source: ClipSource,
        *,
        fps: float | None = None,
        limits: ClipLimits | None = None,
        **options: object,
    ) -> ClipFrames:
        """Return the frames of a file that the model reads; see `read_clip`.

        Args:
            source: a file, its content, a folder of pictures, or a list of pictures.
            fps: frames per second of a folder or a list of pictures.
            limits: limits of the clip.
            options: settings that replace those of the checkpoint; see `Sampling`.
        """
        return read_clip(source, self._get_sampling(options), limits, fps=fps)

    def measure(self, source: ClipSource, *, fps: float | None = None) -> dict[str, Any]:
        """Return `video_grid_thw` [1, 3], `video_metadata` and `image_times` of a clip, which
        follow from its header; arguments as of `read`."""
        return self.measure_plan(open_clip(source, ClipLimits(), fps=fps).plan(self.sampling))

    def convert(self, source: ClipSource, *, fps: float | None = None) -> dict[str, Any]:
        """Return `pixel_values_videos` [p, f] of a clip, and the result of `measure`; arguments as
        of `read`."""
        return self.convert_frames(self.read(source, fps=fps))

    def convert_frames(self, clip: ClipFrames) -> dict[str, Any]:
        """Return the result of `convert` of read frames."""
        patches, _ = self.pack_frames(clip.frames)
        plan = ClipPlan(clip.facts, clip.indices, *clip.frames.shape[1:3])
        return {"pixel_values_videos": patches} | self.measure_plan(plan)

    def measure_plan(self, plan: ClipPlan) -> dict[str, Any]:
        """Return the result of `measure` of the frames that are read, and their size."""
        metadata, step = _describe(plan.facts, plan.indices), self.temporal_patch_size
        sides = plan.height // self.patch_size, plan.width // self.patch_size
        grid = [-(-len(plan.indices) // step), *sides]
        times = np.zeros(grid[0], np.int32)
        if not self.whole:
            times = compute_times(grid[0], step / metadata.sampled_fps, self._tokens_per_second)
        return {
            "video_grid_thw": np.array([grid]),
            "video_metadata": [metadata],
            "image_times": times,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the settings without those of the model."""
        settings = super().to_dict()
        settings.pop("_tokens_per_second", None)
        return settings

    def preprocess(self, videos: object, **options: object) -> BatchFeature:
        """Return the patches of videos, their grids, and with `return_metadata` their facts.

        Args:
            videos: frames [n, h, w, 3] or [n, 3, h, w], files, lists of pictures, or `ClipFrames`;
                one video or a list.
            options: `video_metadata`, `return_tensors`, and settings that replace those of the
                checkpoint. `fps` and `num_frames` sample arrays, too.
        """
        stated = options.get("video_metadata")
        clips = _as_list(videos)
        metadata = [None] * len(clips) if stated is None else _as_metadata(stated)
        if len(metadata) != len(clips):
            raise ValueError(
                f"there are {len(clips)} videos and {len(metadata)} video_metadata: pass one entry "
                "for each video"
            )
        sampled = options.get("do_sample_frames")
        sampled = self.do_sample_frames if sampled is None else sampled
        sampling, patches, grids = self._get_sampling(options), list[Any](), list[list[int]]()
        facts: list[VideoMetadata] = []
        for clip, known in zip(clips, metadata, strict=True):
            frames = self._read_frames(clip, known, sampling, bool(sampled))
            pixels, grid = self.pack_frames(frames.frames)
            patches.append(pixels)
            grids.append(grid)
            facts.append(_describe(frames.facts, frames.indices))
        data: dict[str, Any] = {
            "pixel_values_videos": np.concatenate(patches),
            "video_grid_thw": np.array(grids),
        }
        features = BatchFeature(data, tensor_type=cast(Any, options.get("return_tensors")))
        wanted = options.get("return_metadata")
        if self.return_metadata if wanted is None else wanted:
            features["video_metadata"] = facts
        return features

    def _read_frames(
        self, clip: Video, known: VideoMetadata | None, sampling: Sampling, sampled: bool
    ) -> ClipFrames:
        if isinstance(clip, ClipFrames):
            return clip
        if not isinstance(clip, np.ndarray):
            fps = None if known is None else known.fps
            if isinstance(clip, list | tuple) and sampled:
                clip = np.stack([np.asarray(picture) for picture in clip])
            else:
                return read_clip(clip, sampling, fps=fps)
        frames = clip.transpose(0, 2, 3, 1) if clip.shape[-1] != 3 else clip
        height, width = frames.shape[1:3]
        total = len(frames) if known is None else known.total_num_frames
        fps = None if known is None else known.fps
        facts = ClipFacts(total, fps, height, width, is_sampled=not sampled)
        indices = list(range(len(frames)))
        if sampled:
            indices = sampling.choose_frames(facts)
            frames = frames[indices]
        elif known is not None and known.frames_indices is not None:
            indices = list(known.frames_indices)
        size = sampling.fit_size(len(frames), height, width)
        pictures = Pictures(list(frames), fps, ClipLimits())
        resized = [resize_frame(picture, *size) for picture in pictures.decode(range(len(frames)))]
        return ClipFrames(np.stack(resized), replace(facts, frames=total), indices)

    def pack_frames(self, frames: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """Return the patches [p, f] of resized frames [n, h, w, 3], and their grid.

        A patch contains `temporal_patch_size` frames; the last frame is repeated to fill it.
        """
        step, side, merge = self.temporal_patch_size, self.patch_size, self.merge_size
        frames = np.concatenate([frames, *[frames[-1:]] * (-len(frames) % step)])
        scale = self.rescale_factor if self.do_rescale else 1.0
        mean, std = (0.0, 1.0) if not self.do_normalize else (self.image_mean, self.image_std)
        mean, std = np.asarray(mean, np.float32) / scale, np.asarray(std, np.float32) / scale
        pixels = frames.astype(np.float32)
        pixels -= mean.astype(np.float32)
        pixels /= std.astype(np.float32)
        n, height, width, _ = pixels.shape
        grid = [n // step, height // side, width // side]
        blocks = pixels.reshape(
            grid[0], step, grid[1] // merge, merge, side, grid[2] // merge, merge, side, 3
        )
        # time, block row, block column, row and column in the block, channel, frame, row, column
        patches = blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        return patches.reshape(grid[0] * grid[1] * grid[2], -1), grid

    def get_num_of_video_patches(
        self,
        num_frames: int,
        height: int,
        width: int,
        videos_kwargs: Mapping[str, Any] | None = None,
    ) -> int:
        """Return the number of patches of a video of read frames."""
        sampling = self._get_sampling(videos_kwargs or {})
        rows, columns = sampling.fit_size(num_frames, height, width)
        frames = -(-num_frames // sampling.temporal_patch_size)
        return frames * (rows // sampling.patch_size) * (columns // sampling.patch_size)


class Qwen2VLVideoProcessor(ClipProcessor):
    """The video processor of Qwen2-VL and Qwen2.5-VL."""

    size = {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768}  # noqa: RUF012
    image_mean = OPENAI_CLIP_MEAN
    image_std = OPENAI_CLIP_STD
    patch_size = 14
    max_video_tokens = 128_000


class Qwen3VLVideoProcessor(ClipProcessor):
    """The video processor of Qwen3-VL and Qwen3.5."""

    whole = True
    size = {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768}  # noqa: RUF012
    image_mean = IMAGENET_STANDARD_MEAN
    image_std = IMAGENET_STANDARD_STD
    do_sample_frames = True
    fps = 2
    patch_size = 16
    max_video_tokens = 768


#: Processor of transformers -> its video processor.
VIDEO_PROCESSORS: Mapping[str, type[ClipProcessor]] = {
    "Qwen2VLProcessor": Qwen2VLVideoProcessor,
    "Qwen2_5_VLProcessor": Qwen2VLVideoProcessor,
    "Qwen3VLProcessor": Qwen3VLVideoProcessor,
}


def _as_list(videos: object) -> Sequence[Any]:
    """Return a list of videos; arrays with five axes, and lists of pictures, are converted."""
    if isinstance(videos, np.ndarray):
        return [videos] if videos.ndim == 4 else list(videos)
    if isinstance(videos, list | tuple):
        first = videos[0]
        is_video = isinstance(first, ClipFrames | str | bytes | list | tuple)
        return videos if is_video or getattr(first, "ndim", 3) == 4 else [videos]
    return [videos]


def _as_metadata(stated: object) -> list[VideoMetadata]:
    entries = cast(Sequence[Any], stated if isinstance(stated, list | tuple) else [stated])
    return [
        entry if isinstance(entry, VideoMetadata) else VideoMetadata(**entry) for entry in entries
    ]


def _describe(facts: ClipFacts, indices: Sequence[int]) -> VideoMetadata:
    return VideoMetadata(
        total_num_frames=facts.frames,
        fps=facts.fps,
        width=facts.width,
        height=facts.height,
        duration=facts.frames / facts.fps if facts.fps else None,
        video_backend="pyav",
        frames_indices=list(indices),
    )
