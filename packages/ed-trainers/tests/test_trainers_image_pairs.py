"""Images of prompts in batches of pairs and in completions of rollouts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from ed_trainers.losses.pairs import as_rows, pair_batch
from ed_trainers.online.completions import build_completions
from ed_trainers.rollout import Sampled

IMAGES = np.arange(2 * 3 * 3 * 4 * 4, dtype=np.float32).reshape(2, 3, 3, 4, 4)
MODEL: Any = SimpleNamespace(input_names=("input_ids", "segment_ids", "pixel_values"))


def test_both_sides_of_a_pair_read_the_images_of_its_prompt() -> None:
    ids = np.ones((2, 5), np.int32)
    batch = {"chosen_input_ids": ids, "rejected_input_ids": ids, "pixel_values": IMAGES}
    made = pair_batch(batch, model=MODEL)
    assert made.get_logical_axes("pixel_values") == ("batch", None, None, None, None, None)
    rows = as_rows({name: np.asarray(array) for name, array in made.items()})
    assert rows["input_ids"].shape == (4, 5)
    assert np.array_equal(rows["pixel_values"], IMAGES[[0, 0, 1, 1]])
    assert "pixel_values" not in pair_batch(batch)


def test_completions_have_the_images_of_their_prompts() -> None:
    prompts: Any = SimpleNamespace(input_ids=[[5, 6], [7]], images={"pixel_values": IMAGES})
    sampled = [Sampled([token], [0.0], 0) for token in (1, 2, 3, 4)]
    made = build_completions(prompts, [[5, 6], [7]], sampled, 2, None)
    rows = made.rows(4)
    assert np.array_equal(rows["pixel_values"], IMAGES[[0, 0, 1, 1]])
    first, second = [0, 0, 1, 1], [0, 1, 1, 1]
    assert rows["token_type_ids"].tolist() == [first, first, second, second]
    assert np.array_equal(made.select([3]).rows(4)["pixel_values"], IMAGES[1:])
