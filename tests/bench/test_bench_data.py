"""A stream of ten million parquet rows needs constant memory and resumes without reading again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ed_data import Inform, Mixture, build_loader, train_bpe

from tools.bench import data
from tools.bench.measure import status


@dataclass(frozen=True)
class Stream:
    """Results of a stream of many rows of parquet.

    Attributes:
        rows: Number of rows in all files.
        first: Seconds to the first batch.
        resumed: Seconds from restoring a state in the middle to the next batch.
        read: Number of rows read for the first batch, and for the batch after the resume.
        rate: Tokens per second up to the middle.
        growth: Growth of memory in bytes, from a tenth of the measured part to its end.
        same: Whether the batch after the resume equals that of the uninterrupted stream.
    """

    rows: int
    first: float
    resumed: float
    read: tuple[int, int]
    rate: float
    growth: int
    same: bool


def stream_rows(folder: Path, rows: int, files: int = 10) -> Stream:
    """Stream to the middle of `rows` rows, and resume there with a new loader."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    words = pa.array([f"sheep {i} and goats" for i in range(1000)])
    tokenizer = train_bpe(words.to_pylist(), 300)
    each = rows // files
    for number in range(files):
        numbers = np.random.default_rng(number).integers(0, 1000, each)
        content = words.take(pa.array(numbers))
        pq.write_table(pa.table({"content": content}), folder / f"{number}.parquet")
    mixture = Mixture(
        informs=(Inform(data_files=str(folder / "*.parquet")),),
        streaming=True,
        pack_tokens=True,
        pack_seq_length=data.LENGTH,
        batch_size=data.BATCH,
        cache_dir=str(folder / "cache"),
    )

    def create_loader() -> Any:
        return build_loader(mixture, tokenizer)

    began = time.perf_counter()
    loader = create_loader()
    next(loader)
    first, read = time.perf_counter() - began, loader.stats["documents"]
    began, tokens, memory = time.perf_counter(), 0, 0
    while loader.stats["documents"] < rows // 2:
        tokens += int((next(loader)["segment_ids"] > 0).sum())
        if not memory and loader.stats["documents"] > rows // 20:
            memory = status("VmRSS")
    rate = tokens / (time.perf_counter() - began)
    growth = status("VmRSS") - memory
    state = json.loads(json.dumps(loader.state_dict()))
    expected = next(loader)["input_ids"]
    loader.close()
    began = time.perf_counter()
    again = create_loader()
    again.load_state_dict(state)
    same = bool(np.array_equal(next(again)["input_ids"], expected))
    resumed = time.perf_counter() - began
    counted = again.stats["documents"]
    again.close()
    return Stream(rows, first, resumed, (read, counted), rate, growth, same)


def check(found: Stream) -> None:
    assert found.same
    # The first window and the prefetched second window; after the resume as many.
    assert max(found.read) <= 2 * 4096
    assert found.growth < 64 * 2**20


@pytest.mark.nightly
def test_large_parquet_stream_stays_within_limits(tmp_path: Path) -> None:
    check(stream_rows(tmp_path, 40_000, files=2))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_ten_million_row_stream_stays_within_limits(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    found = stream_rows(tmp_path, 10_000_000)
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
