"""Videos of vision-language models over packed patches, against transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_infra.rope.grids import grid_positions
from ed_infra.testing import require_torch
from ed_models.checkpoints.clips import compute_times
from ed_models.modalities.items import build_encoder_items, used_items

from tests.conformance.cases import subjects

#: Blocks of the images and videos of three prompts: (frames, rows, columns); an image has 0 frames.
PROMPTS = (((0, 2, 1), (3, 1, 2), (0, 1, 1)), ((2, 2, 2), (1, 1, 1)), ((4, 1, 2),))
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


class VideoPrompts:
    """Random prompts with images and videos, and the arrays of a processor.

    Args:
        subject: the tiny model of a family.
        per_frame: whether text precedes each frame of a video (Qwen3-VL).
        seconds: seconds between the frames of each video.
    """

    def __init__(self, subject: Any, *, per_frame: bool, seconds: float = 1.0) -> None:
        rng = np.random.default_rng(4)
        image, video = subject.fields["image_token_id"], subject.fields["video_token_id"]
        form = subject.model.patch_form
        grids: dict[int, list[list[int]]] = {image: [], video: []}
        rows: list[list[int]] = []
        for media in PROMPTS:
            row = rng.integers(3, 100, size=3).tolist()
            for frames, height, width in media:
                token, count = (video, height * width) if frames else (image, height * width)
                grids[token].append([max(frames, 1), height * form.merge, width * form.merge])
                for _ in range(max(frames, 1)):
                    row += [token] * count
                    row += rng.integers(3, 100, size=2).tolist() if per_frame else []
                row += rng.integers(3, 100, size=3).tolist()
            rows.append(row)
        longest = max(map(len, rows))
        self.ids = np.array([[0] * (longest - len(row)) + row for row in rows], np.int32)
        self.mask = np.array([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        self.types = np.where(self.ids == image, 1, np.where(self.ids == video, 2, 0))
        self.arrays: dict[str, np.ndarray] = {}
        for token, names in ((image, ("pixel_values", "image_grid_thw")), (video, VIDEO)):
            token_grids = np.array(grids[token])
            pixels = rng.normal(size=(token_grids.prod(axis=1).sum(), form.numbers)).astype(
                np.float32
            )
            self.arrays |= {names[0]: pixels, names[1]: token_grids}
        self.arrays["second_per_grid_ts"] = np.full(len(grids[video]), seconds, np.float32)

    def torch_arrays(self, names: Mapping[str, Any]) -> dict[str, Any]:
        torch = require_torch()
        arrays = {**self.arrays, "input_ids": self.ids, "attention_mask": self.mask}
        arrays["mm_token_type_ids"] = self.types
        arrays = {name: array for name, array in arrays.items() if name in names}
        return {
            name: torch.tensor(array if array.dtype == np.float32 else array.astype(np.int64))
            for name, array in arrays.items()
        }


VIDEO = ("pixel_values_videos", "video_grid_thw")


@pytest.fixture(scope="module", params=FAMILIES)
def subject(request: pytest.FixtureRequest) -> Any:
    return subjects(request.param)[0]


@pytest.fixture(scope="module")
def prompts(subject: Any) -> VideoPrompts:
    return VideoPrompts(subject, per_frame=subject.model_type == "qwen3_vl", seconds=0.7)


def torch_call(subject: Any, prompts: VideoPrompts) -> dict[str, Any]:
    names = {"input_ids", "attention_mask", "pixel_values", "image_grid_thw", *VIDEO}
    names |= {"mm_token_type_ids"}
    if subject.model_type == "qwen2_5_vl":
        names.add("second_per_grid_ts")
    return prompts.torch_arrays(dict.fromkeys(names))


@pytest.mark.nightly
def test_logits_of_prompts_with_images_and_videos_equal_transformers(
    subject: Any, prompts: VideoPrompts
) -> None:
    torch = require_torch()
    with torch.no_grad():
        expected = subject.torch_model(**torch_call(subject, prompts), use_cache=False).logits
    out = subject.model(prompts.ids, attention_mask=prompts.mask, **prompts.arrays)
    real = prompts.mask == 1
    np.testing.assert_allclose(np.asarray(out.logits)[real], expected.numpy()[real], atol=3e-4)
    assert np.abs(expected.numpy()[real]).max() > 1e-2


@pytest.mark.nightly
def test_generate_continues_after_videos_as_transformers(
    subject: Any, prompts: VideoPrompts
) -> None:
    arguments = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    expected = subject.torch_model.generate(**torch_call(subject, prompts), **arguments)
    tokens = subject.model.generate(
        prompts.ids, attention_mask=prompts.mask, inputs=prompts.arrays, **arguments
    )
    new = prompts.ids.shape[1]
    np.testing.assert_array_equal(
        np.asarray(tokens.sequences if hasattr(tokens, "sequences") else tokens)[:, new:],
        expected[:, new:].numpy(),
    )


def test_positions_of_random_videos_equal_transformers() -> None:
    require_torch()
    subject = subjects("qwen2_5_vl")[0]
    rng = np.random.default_rng(2)
    for _ in range(20):
        seconds = float(np.float32(rng.uniform(0.05, 4)))
        prompts = VideoPrompts(subject, per_frame=False, seconds=seconds)
        arguments = torch_call(subject, prompts)
        names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "attention_mask")
        names = (*names, "video_grid_thw", "second_per_grid_ts")
        expected, _ = subject.torch_model.model.get_rope_index(**{n: arguments[n] for n in names})
        arrays = subject.model.batched_inputs(prompts.ids, prompts.arrays)
        grids = arrays["image_grid_thw"] // np.array([1, 2, 2])
        placeholders = np.isin(prompts.ids, subject.model.placeholder_tokens)
        positions = grid_positions(placeholders, prompts.mask, grids, arrays["image_times"])
        on_device = grid_positions(
            *(jnp.asarray(x) for x in (placeholders, prompts.mask, grids, arrays["image_times"]))
        )
        np.testing.assert_array_equal(positions, expected.numpy())
        np.testing.assert_array_equal(np.asarray(on_device), positions)


def test_times_of_frames_are_those_of_their_seconds() -> None:
    assert compute_times(4, 1.5, None).tolist() == [0, 2, 3, 4]
    assert compute_times(4, 1.0, 2).tolist() == [0, 3, 5, 7]
    assert compute_times(4, 0.1, 2).tolist() == [0, 1, 1, 1]


def test_items_of_a_row_are_its_images_and_frames(subject: Any, prompts: VideoPrompts) -> None:
    model = subject.model
    arrays = model.batched_inputs(prompts.ids, prompts.arrays)
    items = build_encoder_items(model)
    assert items is not None
    for row, media in enumerate(PROMPTS):
        count = int(np.isin(prompts.ids[row], model.placeholder_tokens).sum())
        row_arrays = {name: array[row] for name, array in arrays.items()}
        row_items = used_items(items, row_arrays, count, model.placeholder_tokens)
        assert [length for _, length in row_items] == [
            height * width for frames, height, width in media for _ in range(max(frames, 1))
        ]
    if subject.model_type == "qwen2_5_vl":
        assert arrays["image_times"].tolist()[:2] == [
            [0, 0, 3, 6, 0, 0, 0, 0],
            [0, 3, 0, 0, 0, 0, 0, 0],
        ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"video_grid_thw": None}, "pass both"),
        ({"pixel_values_videos": np.zeros((2, 3, 4))}, r"pass \[patches, numbers\]"),
        ({"pixel_values_videos": np.zeros((5, 96))}, "returned 5 patches, but the grids"),
        ({"image_grid_thw": np.array([[1, 2, 4], [1, 2, 4]])}, "patches, but the grids"),
    ],
)
def test_videos_that_contradict_their_tokens_are_rejected(change: Any, message: str) -> None:
    subject = subjects("qwen3_vl")[0]
    prompts = VideoPrompts(subject, per_frame=True)
    arrays = {**prompts.arrays, **change}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    with pytest.raises(ConfigError, match=message):
        subject.model.batched_inputs(prompts.ids, arrays)
    with pytest.raises(ConfigError, match="more placeholder tokens"):
        subject.model.batched_inputs(np.tile(prompts.ids, (2, 1)), prompts.arrays)
    with pytest.raises(ConfigError, match="fewer placeholder tokens"):
        subject.model.batched_inputs(prompts.ids[:1], prompts.arrays)


def test_model_without_videos_rejects_them() -> None:
    model = subjects("glm4v")[0].model
    arrays = {"pixel_values_videos": np.zeros((4, 96)), "video_grid_thw": np.array([[1, 2, 2]])}
    with pytest.raises(ConfigError, match="reads no videos: omit pixel_values_videos"):
        model.batched_inputs(np.zeros((1, 4), np.int32), arrays)
