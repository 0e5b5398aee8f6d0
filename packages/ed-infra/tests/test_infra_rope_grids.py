"""Rotary positions of texts with images: numbers of transformers, on the host and on devices."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.rope.grids import grid_positions
from ed_infra.testing import require_torch


def rows_of(seed: int, count: int = 6, width: int = 64, images: int = 4):
    """Random rows: placeholders, masks (padded on the left), and grids of features."""
    rng = np.random.default_rng(seed)
    placeholders = np.zeros((count, width), bool)
    grids = np.zeros((count, images, 3), np.int32)
    mask = np.ones((count, width), np.int32)
    for row in range(count):
        at = int(rng.integers(0, 10))
        mask[row, :at] = 0
        for image in range(int(rng.integers(0, images + 1))):
            h, w = rng.integers(1, 5, 2)
            at += int(rng.integers(1, 4))
            if at + h * w >= width:
                break
            grids[row, image] = 1, h, w
            placeholders[row, at : at + h * w] = True
            at += int(h * w)
    return placeholders, mask, grids


@pytest.mark.torch
@pytest.mark.parametrize("seed", range(3))
def test_positions_equal_those_of_transformers(seed: int) -> None:
    torch = require_torch()
    from types import SimpleNamespace

    from transformers import Qwen2VLModel

    placeholders, mask, grids = rows_of(seed)
    ours = grid_positions(placeholders, mask, grids)
    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2))
    model = SimpleNamespace(
        config=config,
        get_vision_position_ids=lambda *args, **options: Qwen2VLModel.get_vision_position_ids(
            None, *args, **options
        ),
    )
    present = grids[grids.prod(axis=2) > 0] * [1, 2, 2]
    theirs, _ = Qwen2VLModel.get_rope_index(
        model,
        torch.zeros(placeholders.shape, dtype=torch.long),
        torch.tensor(placeholders).int(),
        image_grid_thw=torch.tensor(present),
        attention_mask=torch.tensor(mask),
    )
    np.testing.assert_array_equal(ours * mask, theirs.numpy() * mask)


def test_positions_on_host_and_device_are_equal() -> None:
    arrays = rows_of(7)
    host = grid_positions(*arrays)
    assert isinstance(host, np.ndarray) and host.dtype == np.int32
    np.testing.assert_array_equal(grid_positions(*map(jnp.asarray, arrays)), host)


def test_positions_of_packed_documents_equal_those_of_each_document() -> None:
    placeholders, _, grids = rows_of(3)
    mask = np.ones(placeholders.shape, np.int32)
    alone = grid_positions(placeholders, mask, grids)
    segments = np.repeat(np.arange(1, 7), 64)[None]
    packed = grid_positions(placeholders.reshape(1, -1), segments, grids.reshape(1, -1, 3))
    np.testing.assert_array_equal(packed[:, 0].reshape(3, 6, 64), alone)


def test_text_without_images_has_ordinary_positions() -> None:
    mask = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    none = np.zeros((2, 1, 3), np.int32)
    positions = grid_positions(np.zeros((2, 5), bool), mask, none)
    np.testing.assert_array_equal(positions[0], [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]])
    assert (positions == positions[0]).all()
