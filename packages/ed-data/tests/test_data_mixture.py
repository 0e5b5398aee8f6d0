"""The order of documents: proportions, epochs, and access to any position."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from ed_data import DataError
from ed_data.order.mixing import DocumentOrder, permutation
from hypothesis import given, settings
from hypothesis import strategies as st

sizes_of_informs = st.lists(st.integers(1, 60), min_size=1, max_size=4)


def epoch_of(order: DocumentOrder, epoch: int) -> list[tuple[int, int]]:
    informs, documents = order.take(epoch, 0, order.epoch_size)
    return list(zip(informs.tolist(), documents.tolist(), strict=True))


@given(sizes_of_informs, st.integers(1, 50), st.booleans(), st.integers(0, 5))
@settings(deadline=None)
def test_epoch_without_weights_contains_each_document_once(sizes, block, shuffle, seed):
    order = DocumentOrder(sizes, block_size=block, shuffle=shuffle, seed=seed)
    everything = sorted((i, d) for i, size in enumerate(sizes) for d in range(size))
    for epoch in range(2):
        assert sorted(epoch_of(order, epoch)) == everything


@given(sizes_of_informs, st.integers(1, 50), st.data())
@settings(deadline=None)
def test_any_range_of_positions_can_be_computed_separately(sizes, block, data):
    weights = data.draw(st.lists(st.floats(0.01, 1), min_size=len(sizes), max_size=len(sizes)))
    order = DocumentOrder(sizes, weights=weights, block_size=block, seed=3)
    whole = epoch_of(order, 1)
    start = data.draw(st.integers(0, order.epoch_size))
    stop = data.draw(st.integers(start, order.epoch_size + 5))
    fresh = DocumentOrder(sizes, weights=weights, block_size=block, seed=3)
    informs, documents = fresh.take(1, start, stop)
    assert list(zip(informs.tolist(), documents.tolist(), strict=True)) == whole[start:stop]


@given(
    st.lists(st.tuples(st.integers(20, 200), st.floats(0.05, 1)), min_size=2, max_size=4),
    st.sampled_from(["restart", "first_exhausted", "all_exhausted"]),
)
@settings(deadline=None)
def test_every_block_has_the_exact_proportions(informs, strategy):
    sizes, weights = zip(*informs, strict=True)
    order = DocumentOrder(sizes, weights=weights, stop_strategy=strategy, block_size=16, seed=1)
    shares = np.array(weights) / sum(weights)
    drawn, _ = order.take(0, 0, order.epoch_size)
    for end in range(16, order.epoch_size, 16):
        counts = np.bincount(drawn[:end], minlength=len(sizes))
        assert np.abs(counts - shares * end).max() <= 1 + 0.5 * (len(sizes) - 2)


def test_stop_strategies_determine_document_counts():
    def order(strategy):
        return DocumentOrder([100, 10], weights=[0.5, 0.5], stop_strategy=strategy)

    assert order("restart").documents_per_epoch() == [55, 55]
    assert order("first_exhausted").documents_per_epoch() == [10, 10]
    assert order("all_exhausted").documents_per_epoch() == [100, 100]


@given(sizes_of_informs, st.data())
@settings(deadline=None)
def test_epochs_end_with_first_or_last_exhausted_inform(sizes, data):
    weights = data.draw(st.lists(st.floats(0.05, 1), min_size=len(sizes), max_size=len(sizes)))
    first = DocumentOrder(sizes, weights=weights, stop_strategy="first_exhausted")
    counts = first.documents_per_epoch()
    # An epoch has at least one document, which may exceed a very small share.
    assert sum(counts) == 1 or all(c <= n for c, n in zip(counts, sizes, strict=True))
    longest = DocumentOrder(sizes, weights=weights, stop_strategy="all_exhausted")
    seen = set(epoch_of(longest, 0))
    assert seen == {(i, d) for i, size in enumerate(sizes) for d in range(size)}


def test_next_epoch_first_reads_documents_missing_in_previous_epoch():
    order = DocumentOrder([100, 10], weights=[0.5, 0.5], stop_strategy="first_exhausted")
    big = [d for epoch in range(10) for i, d in epoch_of(order, epoch) if i == 0]
    assert Counter(big) == dict.fromkeys(range(100), 1)


def test_repeated_documents_of_a_small_inform_are_balanced():
    order = DocumentOrder([100, 10], weights=[0.5, 0.5], stop_strategy="all_exhausted")
    small = Counter(d for i, d in epoch_of(order, 0) if i == 1)
    assert set(small.values()) == {10}


def test_document_order_differs_between_epochs_and_seeds():
    order = DocumentOrder([200], seed=0)
    assert epoch_of(order, 0) != epoch_of(order, 1)
    assert epoch_of(order, 0) != epoch_of(DocumentOrder([200], seed=1), 0)
    assert epoch_of(order, 0) == epoch_of(DocumentOrder([200], seed=0), 0)


def test_unshuffled_informs_are_read_one_after_another():
    order = DocumentOrder([3, 2], shuffle=False)
    assert epoch_of(order, 0) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


def test_unshuffled_informs_are_mixed_by_weights():
    order = DocumentOrder([4, 4], weights=[0.5, 0.5], shuffle=False)
    assert [i for i, _ in epoch_of(order, 0)] == [0, 1] * 4
    assert [d for i, d in epoch_of(order, 0) if i == 0] == [0, 1, 2, 3]


def test_shuffle_buffer_bounds_how_far_a_document_moves():
    order = DocumentOrder([1000], buffer=10)
    documents = np.array([d for _, d in epoch_of(order, 0)])
    assert np.abs(documents - np.arange(1000)).max() < 10
    assert (documents != np.arange(1000)).any()
    still = DocumentOrder([50], buffer=1)
    assert [d for _, d in epoch_of(still, 0)] == list(range(50))


def test_empty_inform_raises_data_error():
    with pytest.raises(DataError, match=r"\[3, 0\]"):
        DocumentOrder([3, 0])


def test_permutations_are_independent_of_the_numpy_version():
    """The values are pinned, because numpy guarantees the raw stream of PCG64."""
    assert permutation(8, 1, 2, 3).tolist() == [1, 3, 7, 5, 2, 0, 4, 6]
    assert sorted(permutation(100, 5, buffer=7).tolist()) == list(range(100))
