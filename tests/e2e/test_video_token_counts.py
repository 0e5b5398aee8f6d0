"""Placeholder tokens of videos equal those of transformers, from the processor to the engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ed_data.rows.example import RowVideo
from ed_data.tokens.videos import VideoEncoder
from ed_esurge.core.commands import EncoderInput
from ed_infra.testing import require_torch
from ed_models.body.packed_images import PatchForm
from ed_models.checkpoints.clips import ClipError, ClipFacts, ClipPlan
from ed_models.modalities.images import PackedImages

from tests.image_checkpoints import with_tokens
from tests.image_processors import VIDEOS
from tests.video_reference import load_video_processor

pytest.importorskip("PIL.Image")

#: Settings of published checkpoints (Qwen2.5-VL, Qwen3-VL), and those of a server with less memory.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "qwen2_5_vl": [
        {"size": {"shortest_edge": 100352, "longest_edge": 602112}, "max_frames": 64},
        {"size": {"shortest_edge": 3136, "longest_edge": 50176}, "max_frames": 32},
    ],
    "qwen3_vl": [
        {"size": {"shortest_edge": 4096, "longest_edge": 25165824}, "max_frames": 64},
        {"size": {"shortest_edge": 4096, "longest_edge": 1048576}, "max_frames": 768},
    ],
}


def choose_clip(rng: np.random.Generator) -> ClipFacts:
    """Return a clip of up to half an hour, whose frames have sides from 20 to 2,160 pixels."""
    fps = float(rng.choice([8, 15, 23.976, 24, 25, 29.97, 30, 50, 60]))
    frames = int(np.exp(rng.uniform(0.7, np.log(1800 * fps))))
    height, width = np.exp(rng.uniform(3.0, 7.68, 2)).astype(int).tolist()
    return ClipFacts(frames, fps, height, width)


def describe_reference(reference: Any, facts: ClipFacts, rate: float) -> dict[str, Any]:
    """Return the grid and the metadata of a clip in transformers."""
    torch = require_torch()
    from transformers.image_utils import SizeDict
    from transformers.video_utils import VideoMetadata

    metadata = VideoMetadata(total_num_frames=facts.frames, fps=facts.fps)
    metadata.frames_indices = reference.sample_frames(metadata=metadata, fps=rate).tolist()
    count = len(metadata.frames_indices)
    height, width = reference.resize(
        torch.empty(1).expand(1, count, 3, facts.height, facts.width),
        size=SizeDict(**reference.size),
        resample=3,
        factor=reference.patch_size * reference.merge_size,
        temporal_factor=2,
    )
    grid = [-(-count // 2), height // reference.patch_size, width // reference.patch_size]
    return {"video_grid_thw": np.array([grid]), "video_metadata": [metadata]}


@pytest.mark.parametrize("count", [25, pytest.param(400, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", list(SETTINGS))
def test_placeholder_tokens_of_random_clips_equal_transformers(name: str, count: int) -> None:
    """No frame is decoded: tokens follow from the facts of a clip."""
    processor: Any = VIDEOS[name](with_tokens)
    kind, rng = type(processor.video_processor), np.random.default_rng(0)
    side = kind().patch_size
    engine = PackedImages(PatchForm(side, 3 * 2, 2, has_axes=True), 8, 2**15, is_timed=True)
    checked = 0
    for settings in SETTINGS[name]:
        ours = kind(**settings)
        reference = load_video_processor(kind.__name__, **{**vars(ours), **settings})
        for number in range(count):
            facts, rate = choose_clip(rng), float(rng.choice([0.5, 1, 2, 4]))
            sampling = kind(**settings, fps=rate).sampling
            try:
                indices = sampling.choose_frames(facts)
                plan = ClipPlan(
                    facts, indices, *sampling.fit_size(len(indices), facts.height, facts.width)
                )
            except ClipError:  # too short or too narrow, which transformers refuses, too
                with pytest.raises((ValueError, ZeroDivisionError)):
                    describe_reference(reference, facts, rate)
                continue
            processor.video_processor = ours
            expected = processor.replace_video_token(describe_reference(reference, facts, rate), 0)
            output = ours.measure_plan(plan)
            assert processor.replace_video_token(output, 0) == expected, (facts, rate, settings)
            tokens = expected.count(processor.video_token)
            (grid,), times = output["video_grid_thw"], output["image_times"]
            features = int(grid[1] * grid[2]) // 4
            assert tokens == features * grid[0]
            assert len(times) == grid[0]
            checked += 1
            pixels = np.broadcast_to(np.float32(0), (features * 4, 3 * 2 * side**2))
            arrays = {"pixel_values": pixels, "image_grid_thw": np.array([1, *grid[1:]])}
            arrays["image_times"] = np.asarray(times[-1])
            assert engine.check(EncoderInput(b"", arrays, 3, features)) is None
            if number < 5:
                reader = SimpleNamespace(
                    whole=ours.whole, measure=ours.measure_plan, merge_size=2, temporal_patch_size=2
                )
                processor.video_processor = reader
                size = VideoEncoder(processor).measure(RowVideo(plan, f"video {number}"))
                ids = processor.tokenizer(expected, add_special_tokens=False)["input_ids"]
                assert (size.tokens, size.features) == (ids, tokens)
    assert checked > count
