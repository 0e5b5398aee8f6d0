"""Streams of hub datasets, tested with folders that `datasets` loads in the same way."""

from __future__ import annotations

import json

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ed_data import DataError, Inform, build_loader, data_report, report
from ed_data.order import stream
from ed_data.sources import open_source, records
from ed_data.sources.files import FileCache, FileSource
from ed_data.sources.hub import HubStream
from ed_data.sources.lines import Spot

STREAMED = FileCache(None, streaming=True)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A dataset of three parquet files, or of three json files, and a test split."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")

    def make(kind: str) -> str:
        path = tmp_path / kind
        path.mkdir()
        for i in range(3):
            rows = [{"content": f"{i} {j} " + "sheep " * (j % 7), "id": j} for j in range(40)]
            name = path / f"train-{i:05d}-of-00003"
            if kind == "parquet":
                pq.write_table(pa.Table.from_pylist(rows), f"{name}.parquet", row_group_size=9)
            else:
                name.with_suffix(".jsonl").write_text("\n".join(map(json.dumps, rows)))
        return str(path)

    return make


def inform_of(where: str, **options) -> Inform:
    return Inform(type="huggingface", data_files=where, **options)


@pytest.mark.parametrize(("kind", "reader"), [("parquet", FileSource), ("jsonl", HubStream)])
def test_stream_of_hub_dataset_starts_at_any_row_without_download(folder, tmp_path, kind, reader):
    inform = inform_of(folder(kind), name="hub")
    source = open_source(inform, STREAMED)
    assert type(source) is reader
    assert len(source.shards) == 3
    whole = [list(records(source, shard, ["content"])) for shard in range(3)]
    texts = [record.row["content"] for shard in whole for record in shard]
    assert texts == [f"{i} {j} " + "sheep " * (j % 7) for i in range(3) for j in range(40)]
    assert all(set(record.row) == {"content"} for record in whole[0])
    for row in (0, 8, 9, 31, 39, 40):
        assert list(records(source, 1, ["content"], Spot(row))) == whole[1][row:]
    assert not list((tmp_path / "hf").rglob("*.arrow"))
    assert [row for _, row in source.rows()] == [row for _, row in open_source(inform).rows()]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_stream_resumes_exactly(mixture, tokenizer, folder, monkeypatch, kind):
    monkeypatch.setattr(stream, "WINDOW_DOCUMENTS", 25)
    made = mixture(
        informs=[inform_of(folder(kind), name="hub")], streaming=True, pack_seq_length=48
    )
    loader = build_loader(made, tokenizer, batch_size=2)
    states, batches = [], []
    for _ in range(30):
        states.append(json.dumps(loader.state_dict()))
        batches.append(next(loader))
    for step in range(0, 29, 4):
        again = build_loader(made, tokenizer, batch_size=2)
        again.load_state_dict(json.loads(states[step]))
        for expected in batches[step : step + 2]:
            found = next(again)
            assert all(np.array_equal(found[key], expected[key]) for key in expected)
    state = json.loads(states[20])["order"]
    assert {"shard", "row"} <= state["documents"]["informs"][0].keys()
    assert state["window"] > 0


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_streaming_report_downloads_no_files(
    mixture, tokenizer, folder, tmp_path, monkeypatch, kind
):
    monkeypatch.setattr(report, "STREAMED_ROWS", 50)
    made = mixture(informs=[inform_of(folder(kind), name="hub")], streaming=True)
    found = data_report(made, tokenizer, batch_size=2)
    assert found.sources[0].documents == 50
    assert not list((tmp_path / "hf").rglob("*.arrow"))


def test_missing_split_raises_data_error(folder):
    with pytest.raises(DataError, match=r"no split 'tran'; did you mean 'train'"):
        open_source(inform_of(folder("parquet"), split="tran"), STREAMED)
    with pytest.raises(DataError, match="cannot load dataset"):
        open_source(inform_of("absent/nowhere-at-all"), STREAMED)
