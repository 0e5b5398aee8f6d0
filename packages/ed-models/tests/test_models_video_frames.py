"""Frames and sizes of videos, and the arrays of the video processors, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ed_infra.testing import require_torch
from ed_models.checkpoints.clips import ClipError, ClipFacts, ClipLimits, Sampling, read_clip
from ed_models.checkpoints.video_processor import (
    Qwen2VLVideoProcessor,
    Qwen3VLVideoProcessor,
)

from tests.video_files import write_gif, write_video
from tests.video_reference import load_video_processor

PROCESSORS = (Qwen2VLVideoProcessor, Qwen3VLVideoProcessor)
#: Settings of published checkpoints, and tighter ones.
SETTINGS: dict[Any, list[dict[str, Any]]] = {
    Qwen2VLVideoProcessor: [
        {"size": {"shortest_edge": 3136, "longest_edge": 12845056}},
        {"size": {"shortest_edge": 100352, "longest_edge": 602112}, "cap_pixels_per_frame": True},
    ],
    Qwen3VLVideoProcessor: [
        {"size": {"shortest_edge": 4096, "longest_edge": 25165824}},
        {"size": {"shortest_edge": 131072, "longest_edge": 786432}, "cap_pixels_per_frame": True},
    ],
}


@pytest.mark.parametrize("clips", [200, pytest.param(5000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", PROCESSORS)
def test_frames_and_sizes_of_random_clips_equal_transformers(kind: Any, clips: int) -> None:
    torch = require_torch()
    from transformers.image_utils import SizeDict
    from transformers.video_utils import VideoMetadata

    rng = np.random.default_rng(0)
    for settings in SETTINGS[kind]:
        processor = kind(**settings)
        reference = load_video_processor(kind.__name__, **settings)
        for _ in range(clips):
            frames, height, width = rng.integers((2, 20, 20), (4000, 1400, 1400)).tolist()
            fps = float(rng.choice([8, 15, 23.976, 24, 25, 29.97, 30, 60]))
            rate = float(rng.choice([0.5, 1, 2, 4]))
            facts = ClipFacts(frames, fps, height, width)
            metadata = VideoMetadata(total_num_frames=frames, fps=fps)
            sampling = Sampling.from_options({**vars(processor.sampling), "fps": rate})
            indices = sampling.choose_frames(facts)
            expected = reference.sample_frames(metadata=metadata, fps=rate)
            assert indices == expected.tolist(), (frames, fps, rate)
            if len(indices) < 2 or max(height, width) > 150 * min(height, width):
                continue
            size = reference.resize(
                torch.empty(1).expand(1, len(indices), 3, height, width),
                size=SizeDict(**processor.size),
                resample=3,
                factor=processor.patch_size * processor.merge_size,
                temporal_factor=2,
                cap_pixels_per_frame=processor.cap_pixels_per_frame,
            )
            assert sampling.fit_size(len(indices), height, width) == size, (facts, settings)


@pytest.mark.parametrize("kind", PROCESSORS)
def test_patches_of_frames_equal_transformers(kind: Any) -> None:
    torch = require_torch()
    processor = kind(size={"shortest_edge": 4096, "longest_edge": 100_000})
    video = np.random.default_rng(1).integers(0, 256, (7, 90, 130, 3), np.uint8)
    arrays = processor(video, return_tensors="np", do_sample_frames=False)
    height, width = processor.sampling.fit_size(7, 90, 130)
    frames = torch.tensor(video).permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(
        frames, (height, width), mode="bicubic", antialias=True
    )
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (processor.image_mean, processor.image_std))
    pixels = ((resized.float() / 255 - mean) / std)[None]
    reference = load_video_processor(kind.__name__)
    (patches,), *grid = reference.patchify(
        pixels, processor.patch_size, processor.merge_size, processor.temporal_patch_size
    )
    assert arrays["video_grid_thw"].tolist() == [grid]
    # The kernels of PIL and torch differ by one level of 255.
    level = 1.001 / 255 / min(processor.image_std)
    np.testing.assert_allclose(arrays["pixel_values_videos"], patches.numpy(), atol=level)


SAMPLING = Sampling(whole=True, fps=2, shortest_edge=1024, longest_edge=65536, patch_size=4)


def test_gif_folder_and_list_contain_the_same_frames(tmp_path: Path) -> None:
    from PIL import Image

    frames = np.repeat(np.arange(0, 200, 40, dtype=np.uint8), 24 * 32 * 3).reshape(5, 24, 32, 3)
    for number, frame in enumerate(frames):
        Image.fromarray(frame).save(tmp_path / f"{number}.png")
    everything = Sampling.from_options({**vars(SAMPLING), "num_frames": 5})
    gif = read_clip(write_gif(frames, 500), everything)
    folder = read_clip(tmp_path, everything, fps=2.0)
    pictures = read_clip([Image.fromarray(frame) for frame in frames], everything, fps=2.0)
    assert gif.facts.fps == folder.facts.fps == pictures.facts.fps == 2.0
    assert gif.indices == folder.indices == pictures.indices == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(folder.frames, pictures.frames)
    np.testing.assert_array_equal(folder.frames, gif.frames)
    assert folder.frames[:, 0, 0, 0].tolist() == [0, 40, 80, 120, 160]


#: Levels of frames, [n, 1, 1, 1].
LEVELS = np.arange(0, 240, 8, np.uint8)[:, None, None, None]


def test_video_file_is_sampled_at_two_frames_per_second(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(write_video(np.full((48, 64, 3), 1, np.uint8) * LEVELS))
    clip = read_clip(path, SAMPLING)
    assert (clip.facts.frames, clip.facts.fps) == (30, 10.0)
    assert clip.indices == [0, 6, 12, 17, 23, 29]
    levels = clip.frames[:, 5, 5, 0].astype(int)
    np.testing.assert_allclose(levels, np.array(clip.indices) * 8, atol=6)
    assert read_clip(path.read_bytes(), SAMPLING).frames.tobytes() == clip.frames.tobytes()
    with pytest.raises(ClipError, match="30 frames, and the limit is 20"):
        read_clip(path, SAMPLING, ClipLimits(frames=20))
    with pytest.raises(ClipError, match="cannot be decoded"):
        read_clip(path.read_bytes()[:300], SAMPLING)


@pytest.mark.parametrize(
    ("source", "limits", "message"),
    [
        (b"GIF89a", ClipLimits(), "cannot be decoded"),
        (b"GIF89a" * 100, ClipLimits(bytes=50), "600 bytes, and the limit is 50 bytes"),
        ([], ClipLimits(), "has no frames"),
        ([np.zeros((8, 8, 3), np.uint8)] * 9, ClipLimits(frames=8), "9 frames, and the limit is 8"),
        ([np.zeros((8, 8, 3), np.uint8)] * 9, ClipLimits(pixels=60), "64 pixels in a frame"),
        ([np.zeros((8, 8, 3), np.uint8)] * 9, ClipLimits(values=60), "9 frames of .* pixels"),
        ([np.zeros((8, 9, 3), np.uint8), np.zeros((8, 8, 3), np.uint8)], None, "frame 1 has 8 x 8"),
        ([np.zeros((8, 8, 3), np.uint8)], None, "too short: use at least 2"),
        ([np.zeros((2, 900, 3), np.uint8)] * 2, None, "at most 200 times"),
    ],
)
def test_clips_beyond_a_limit_are_rejected(source: Any, limits: Any, message: str) -> None:
    with pytest.raises(ClipError, match=message):
        read_clip(source, SAMPLING, limits)


def test_long_clip_is_rejected_by_its_duration() -> None:
    frames = np.arange(8, dtype=np.uint8)[:, None, None, None] * np.ones((1, 8, 8, 3), np.uint8)
    with pytest.raises(ClipError, match="8 seconds, and the limit is 5"):
        read_clip(write_gif(frames * 20, 1000), SAMPLING, ClipLimits(seconds=5))
