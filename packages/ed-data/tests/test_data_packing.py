"""Packing: each token once, no row too long, and the fill ratio of each strategy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from ed_data import DataError, pack
from ed_data.order.packing import STRATEGIES, Packing
from hypothesis import given, settings
from hypothesis import strategies as st

lengths_of_documents = st.lists(st.integers(0, 70), max_size=80)
capacities = st.integers(1, 40)


def rows_of(packing: Packing) -> list[list[tuple[int, int, int]]]:
    pieces = list(
        zip(
            packing.document.tolist(),
            packing.start.tolist(),
            packing.length.tolist(),
            strict=True,
        )
    )
    bounds = packing.row_offsets.tolist()
    return [pieces[a:b] for a, b in itertools.pairwise(bounds)]


@given(lengths_of_documents, capacities, st.sampled_from(STRATEGIES), st.booleans())
@settings(deadline=None)
def test_every_token_is_placed_once(lengths, capacity, strategy, truncate):
    packing = pack(np.array(lengths, np.int64), capacity, strategy, truncate=truncate)
    expected = [min(n, capacity) if truncate else n for n in lengths]
    seen = [np.zeros(n, int) for n in expected]
    for row in rows_of(packing):
        assert row, "a row without a piece"
        assert sum(length for _, _, length in row) <= capacity
        for document, start, length in row:
            assert length >= 1
            assert start + length <= expected[document]
            seen[document][start : start + length] += 1
    assert all((counts == 1).all() for counts in seen)


@given(lengths_of_documents, capacities, st.sampled_from(STRATEGIES))
@settings(deadline=None)
def test_rows_are_ordered_by_first_document_and_pieces_by_document(lengths, capacity, strategy):
    rows = rows_of(pack(np.array(lengths, np.int64), capacity, strategy))
    firsts = [row[0][:2] for row in rows]
    assert firsts == sorted(firsts)
    assert all(row == sorted(row) for row in rows)


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 50))
@settings(deadline=None)
def test_best_fit_decreasing_equals_reference_implementation(lengths, capacity):
    """Compare with the definition: longest first, each in the fullest row with enough room."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=lambda i: rooms[i])] -= length
        else:
            rooms.append(capacity - length)
    packing = pack(np.array(lengths, np.int64), capacity, "bfd")
    used = [sum(length for _, _, length in row) for row in rows_of(packing)]
    assert sorted(capacity - u for u in used) == sorted(rooms)


@given(st.lists(st.integers(1, 20), max_size=60))
@settings(deadline=None)
def test_first_fit_equals_reference_implementation(lengths):
    rows: list[list[int]] = []
    for document, length in enumerate(lengths):
        for row in rows:
            if sum(lengths[d] for d in row) + length <= 20:
                row.append(document)
                break
        else:
            rows.append([document])
    packing = pack(np.array(lengths, np.int64), 20, "first_fit")
    assert [[d for d, _, _ in row] for row in rows_of(packing)] == rows


@given(st.lists(st.integers(1, 20), max_size=60))
@settings(deadline=None)
def test_greedy_keeps_the_order_of_documents(lengths):
    rows = rows_of(pack(np.array(lengths, np.int64), 20, "greedy"))
    assert [d for row in rows for d, _, _ in row] == list(range(len(lengths)))
    for row, following in itertools.pairwise(rows):
        assert sum(n for _, _, n in row) + following[0][2] > 20


@given(lengths_of_documents, capacities)
@settings(deadline=None)
def test_wrapped_fills_all_rows_except_the_last(lengths, capacity):
    rows = rows_of(pack(np.array(lengths, np.int64), capacity, "wrapped"))
    assert all(sum(n for _, _, n in row) == capacity for row in rows[:-1])


def test_best_fit_decreasing_fills_rows():
    lengths = np.random.default_rng(0).lognormal(5, 1, 20_000).astype(np.int64) + 1
    packing = pack(lengths, 4096, "bfd")
    assert packing.tokens / (packing.rows * 4096) > 0.999


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_reordered_packing_moves_whole_rows(lengths, random):
    packing = pack(np.array(lengths, np.int64), 10)
    order = list(range(packing.rows))
    random.shuffle(order)
    before = rows_of(packing)
    assert rows_of(packing.reorder_rows(np.array(order))) == [before[i] for i in order]


def test_unknown_strategy_and_invalid_length_raise_data_error():
    with pytest.raises(DataError, match="did you mean 'greedy'"):
        pack(np.array([1]), 8, "greddy")
    with pytest.raises(DataError, match="at least 1"):
        pack(np.array([1]), 0)


@given(
    lengths=st.lists(st.integers(1, 40), max_size=120),
    capacity=st.integers(40, 90),
)
@settings(deadline=None, max_examples=200)
def test_both_best_fit_algorithms_produce_the_same_plan(lengths, capacity):
    from ed_data.order.packing import best_fit_by_length, best_fit_by_row

    pieces = np.array(lengths, np.int64)
    first, second = best_fit_by_row(pieces, capacity), best_fit_by_length(pieces, capacity)
    assert first.tolist() == second.tolist()


@given(
    lengths=st.lists(st.integers(1, 30), max_size=80),
    capacity=st.integers(30, 70),
)
@settings(deadline=None)
def test_best_fit_equals_reference_implementation(lengths, capacity):
    """Among rows with equal room, the row that reached this room first is filled first."""
    from ed_data.order.packing import best_fit_by_row

    rows: list[list[int]] = []  # room, and when the row reached it
    chosen = [0] * len(lengths)
    for turn, piece in enumerate(sorted(range(len(lengths)), key=lambda i: -lengths[i])):
        fitting = [(*row, number) for number, row in enumerate(rows) if row[0] >= lengths[piece]]
        number = min(fitting)[2] if fitting else len(rows)
        if not fitting:
            rows.append([capacity, turn])
        rows[number] = [rows[number][0] - lengths[piece], turn]
        chosen[piece] = number
    assert best_fit_by_row(np.array(lengths, np.int64), capacity).tolist() == chosen
