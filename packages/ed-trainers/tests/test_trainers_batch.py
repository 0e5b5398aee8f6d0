"""The shift of labels: once, on the host, within segments."""

from __future__ import annotations

import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_infra.masks import segment_index
from ed_trainers.losses.next_token import next_token_batch, places_in_segments
from ed_trainers.placement import microbatches, pad_rows


def test_targets_do_not_cross_segments_or_padding():
    batch = {
        "input_ids": np.array([[5, 6, 7, 8, 9, 0]], np.int32),
        "labels": np.array([[5, 6, 7, 8, 9, -100]], np.int32),
        "segment_ids": np.array([[1, 1, 1, 2, 2, 0]], np.int32),
        "position_ids": np.array([[0, 1, 2, 0, 1, 0]], np.int32),
    }
    out = next_token_batch(batch)
    np.testing.assert_array_equal(out["targets"], [[6, 7, 0, 9, 0, 0]])
    np.testing.assert_array_equal(out["weights"], [[1, 1, 0, 1, 0, 0]])
    assert out["weights"].dtype == np.float32
    assert out["targets"].dtype == np.int32


def test_ignored_labels_and_weights_belong_to_the_predicted_token():
    batch = {
        "input_ids": np.array([[5, 6, 7, 8]], np.int32),
        "labels": np.array([[-100, -100, 7, 8]], np.int32),
        "loss_weights": np.array([[0.1, 0.2, 0.3, 0.4]], np.float32),
    }
    out = next_token_batch(batch)
    np.testing.assert_array_equal(out["targets"], [[0, 7, 8, 0]])
    np.testing.assert_allclose(out["weights"], [[0, 0.3, 0.4, 0]])


def test_defaults_of_a_bare_batch():
    out = next_token_batch({"input_ids": np.array([[5, 6, 7]])})
    np.testing.assert_array_equal(out["segment_ids"], [[1, 1, 1]])
    np.testing.assert_array_equal(out["position_ids"], [[0, 1, 2]])
    np.testing.assert_array_equal(out["targets"], [[6, 7, 0]])
    packed = next_token_batch(
        {"input_ids": np.zeros((1, 6), int), "segment_ids": np.array([[1, 1, 2, 2, 2, 0]])}
    )
    np.testing.assert_array_equal(packed["position_ids"], [[0, 1, 0, 1, 2, 0]])


def test_a_batch_that_does_not_fit_is_an_error():
    with pytest.raises(ConfigError, match="no input_ids, only labels"):
        next_token_batch({"labels": np.zeros((1, 2), int)})
    with pytest.raises(ConfigError, match=r"labels has shape \(1, 2\), input_ids has \(1, 3\)"):
        next_token_batch({"input_ids": np.zeros((1, 3), int), "labels": np.zeros((1, 2), int)})


def test_rows_are_cut_in_order_and_padded_with_zeros():
    batch = {"x": np.arange(12).reshape(6, 2)}
    parts = microbatches(batch, 3)["x"]
    assert parts.shape == (3, 2, 2)
    np.testing.assert_array_equal(parts.reshape(6, 2), batch["x"])
    padded = pad_rows(batch, 8)["x"]
    np.testing.assert_array_equal(padded[:6], batch["x"])
    assert not padded[6:].any()


def test_places_are_counted_on_the_host_as_on_a_device():
    random = np.random.default_rng(0)
    segments = np.sort(random.integers(1, 4, (5, 12)), axis=1).astype(np.int32)
    segments[1, 9:] = 0
    segments[2, :3] = 0
    found = places_in_segments(segments)
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, segment_index(segments))
