"""A stream of ten million parquet rows needs constant memory and resumes without reading again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tools.bench import data


def check(found: data.Large) -> None:
    assert found.same
    # The first window and the prefetched second window; after the resume as many.
    assert max(found.read) <= 2 * 4096
    assert found.growth < 64 * 2**20


@pytest.mark.nightly
def test_large_parquet_stream_stays_within_limits(tmp_path: Path) -> None:
    check(data.large(tmp_path, 40_000, files=2))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_ten_million_row_stream_stays_within_limits(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    found = data.large(tmp_path, 10_000_000)
    record_property("summary", f"ten million rows of parquet: {found}")
    check(found)


@pytest.mark.nightly
def test_data_benchmark_contenders_run(tmp_path: Path) -> None:
    """Run the contenders on a few documents; the figures need an otherwise idle machine."""
    corpus = data.Corpus.make(tmp_path, 300, chats=False)
    rates = data.tokenizing(corpus, [None], rounds=1)
    assert {"ed-data", "datasets.map"} <= rates.keys()
    rates |= data.loading(corpus, rounds=1)
    assert all(rate > 0 for rate in rates.values())
    assert "million tokens/s" in data.show("tokenizing", rates)
