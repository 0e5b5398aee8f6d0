"""Packed rows of chats are nearly full: the table of `tools.bench.packing`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tools.bench import packing


@pytest.mark.nightly
@pytest.mark.parametrize("length", [4096, 8192])
def test_packed_rows_reach_fill_targets(
    length: int, record_property: Callable[[str, object], None]
) -> None:
    rows = packing.figures(65_536, length, rounds=1)
    record_property("summary", packing.show("packing", rows))
    fill = {row.name: row.fill for row in rows}
    best = fill["bfd"]
    assert best >= 0.999
    assert fill["bfd, window 4,096"] >= 0.998
    assert fill["bfd for pairs"] >= 0.98
    assert fill["bfd for pairs, window 4,096"] >= 0.98
    assert best == pytest.approx(fill["bisect"], abs=1e-4)
    assert best > fill["first_fit"] > fill["greedy"]


def test_packing_plans_contain_every_token() -> None:
    lengths = packing.chat_lengths(5000, 4096)
    plans = packing.in_windows(lengths, 4096, "bfd", 1000)
    assert sum(plan.tokens for plan in plans) == lengths.sum()
    assert packing.bisect_rows(lengths[:1000], 4096) == plans[0].rows


def test_packed_tokens_keep_their_positions() -> None:
    lengths = packing.chat_lengths(300, 512)
    ends = np.cumsum(lengths)
    documents = np.repeat(np.arange(300), lengths)
    tokens, positions = packing.moved((documents % 251 + 1).astype(np.uint8), lengths, 512)
    assert np.bincount(tokens[tokens > 0]).tolist() == np.bincount(documents % 251 + 1).tolist()
    expected = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    assert sorted(positions[tokens > 0]) == sorted(expected)
