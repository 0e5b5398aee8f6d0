"""Span corruption equals the published algorithm, and depends on seed, step and document only."""

from __future__ import annotations

import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_trainers.losses.spans import (
    Sentinels,
    corrupted_rows,
    noise_counts,
    noise_mask,
    target_length,
    target_width,
)
from hypothesis import given, settings
from hypothesis import strategies as st

EOS, PAD, VOCAB = 1, 0, 100
SENTINELS = Sentinels(np.arange(VOCAB, VOCAB + 60, dtype=np.int32), EOS)
OPTIONS = {"density": 0.15, "mean_span": 3.0, "pad": PAD}


def reference_mask(length: int, density: float, mean_span: float) -> np.ndarray:
    """Return a mask of `random_spans_noise_mask` in `run_t5_mlm_flax.py` of transformers."""
    noise = int(np.round(length * density))
    noise = min(max(noise, 1), length - 1)
    spans = max(int(np.round(noise / mean_span)), 1)
    others = length - noise

    def segmentation(items: int, segments: int) -> np.ndarray:
        mask = np.arange(items - 1) < (segments - 1)
        np.random.shuffle(mask)
        first = np.pad(mask, [[1, 0]])
        _, lengths = np.unique(np.cumsum(first), return_counts=True)
        return lengths

    interleaved = np.stack([segmentation(others, spans), segmentation(noise, spans)], axis=1)
    starts = np.cumsum(interleaved.reshape(-1))[:-1]
    indicator = np.zeros((length,), np.int8)
    indicator[starts] = True
    return np.equal(np.cumsum(indicator) % 2, 1)[:length]


def reference_ids(ids: np.ndarray, mask: np.ndarray) -> list[int]:
    """Return the ids of `create_sentinel_ids` and `filter_input_ids`, with our sentinels."""
    starts = mask - np.roll(mask, 1, axis=-1) * mask
    starts[0] = mask[0]
    numbers = np.where(starts != 0, np.cumsum(starts), starts)
    sentinels = np.where(numbers != 0, VOCAB + numbers - 1, 0) - (mask - starts)
    full = np.where(sentinels != 0, sentinels, ids)
    return [*full[full >= 0].tolist(), EOS]


@settings(max_examples=60, deadline=None)
@given(length=st.integers(4, 400), seed=st.integers(0, 2**31))
def test_noise_mask_equals_the_algorithm_of_t5(length: int, seed: int) -> None:
    """The same shuffles produce the same mask."""

    noise, spans = noise_counts(length, 0.15, 3.0)
    np.random.seed(seed)
    other = reference_mask(length, 0.15, 3.0)
    assert noise == other.sum()
    assert spans == (np.diff(other.astype(int), prepend=0) == 1).sum()
    # The reference divides the other tokens first, and the noise second.
    np.random.seed(seed)
    draws = [np.arange(length - noise - 1) < spans - 1, np.arange(noise - 1) < spans - 1]
    for mask in draws:
        np.random.shuffle(mask)

    queue = draws[::-1]  # ours divides the noise first

    class Fixed:
        def permutation(self, x: np.ndarray) -> np.ndarray:
            return queue.pop(0)

    found = noise_mask(length, noise, spans, Fixed())  # type: ignore[arg-type]
    assert found.tolist() == other.tolist()


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(2, 60), min_size=1, max_size=6), step=st.integers(0, 9))
def test_corrupted_documents_equal_the_reference_and_can_be_restored(
    lengths: list[int], step: int
) -> None:
    random = np.random.default_rng(step)
    documents = [np.append(random.integers(2, VOCAB, n), EOS) for n in lengths]
    width = sum(map(len, documents))
    ids = np.concatenate(documents)[None].astype(np.int32)
    segments = np.repeat(np.arange(len(lengths)) + 1, [len(d) for d in documents])[None]
    rows = corrupted_rows(
        ids, segments.astype(np.int32), SENTINELS, width=2 * width, seed=(7, step), **OPTIONS
    )
    for number, document in enumerate(documents, 1):
        source = rows.input_ids[0][rows.segment_ids[0] == number]
        target = rows.labels[0][rows.decoder_segment_ids[0] == number]
        restored, mask, queue = [], [], target.tolist()
        assert queue.pop() == EOS
        for token in source.tolist()[:-1]:
            if token < VOCAB:
                restored.append(token)
                mask.append(0)
                continue
            assert queue.pop(0) == token, "the target has the sentinels in the order of the source"
            while queue and queue[0] < VOCAB:
                restored.append(queue.pop(0))
                mask.append(1)
        assert restored == document[:-1].tolist()
        noise = np.array(mask)
        assert reference_ids(document[:-1], noise) == source.tolist()
        assert reference_ids(document[:-1], 1 - noise) == target.tolist()
        assert len(target) == target_length(len(document) - 1, 0.15, 3.0)
        assert rows.position_ids[0][rows.segment_ids[0] == number].tolist() == [*range(len(source))]


def test_draws_depend_on_seed_step_and_document_only() -> None:
    random = np.random.default_rng(0)
    documents = [np.append(random.integers(2, VOCAB, 60), EOS) for _ in range(3)]

    def sources(order: list[int], seed: tuple[int, int]) -> dict[int, list[int]]:
        ids = np.concatenate([documents[i] for i in order])[None].astype(np.int32)
        segments = np.repeat(np.arange(len(order)) + 1, 61)[None].astype(np.int32)
        rows = corrupted_rows(ids, segments, SENTINELS, width=96, seed=seed, **OPTIONS)
        return {
            i: rows.input_ids[0][rows.segment_ids[0] == n].tolist() for n, i in enumerate(order, 1)
        }

    first = sources([0, 1, 2], (3, 4))
    assert sources([2, 0], (3, 4)) == {2: first[2], 0: first[0]}
    assert sources([0, 1, 2], (3, 5)) != first
    assert sources([0, 1, 2], (4, 4)) != first


def test_document_without_room_for_its_targets_has_no_loss() -> None:
    ids = np.tile(np.append(np.arange(2, 32), EOS), 2)[None].astype(np.int32)
    segments = np.repeat([1, 2], 31)[None].astype(np.int32)
    rows = corrupted_rows(ids, segments, SENTINELS, width=8, seed=(0, 1), **OPTIONS)
    assert set(rows.decoder_segment_ids[0]) == {0, 1}
    unchanged = rows.input_ids[0][rows.segment_ids[0] == 2]
    assert unchanged.tolist() == ids[0][segments[0] == 2].tolist()


def test_more_spans_than_sentinels_are_an_error() -> None:
    few = Sentinels(SENTINELS.ids[:2], EOS)
    ids = np.arange(2, 90)[None].astype(np.int32)
    with pytest.raises(ConfigError, match="has 4 spans, and the tokenizer has 2 sentinels"):
        corrupted_rows(ids, np.ones_like(ids), few, width=64, seed=(0, 1), **OPTIONS)


def test_default_width_has_room_for_a_row_with_one_document() -> None:
    for positions in (16, 64, 512):
        assert target_width(positions, 0.15, 3.0) >= target_length(positions, 0.15, 3.0)
    assert target_length(568, 0.15, 3.0) == 114, "T5's targets of 568 tokens"
