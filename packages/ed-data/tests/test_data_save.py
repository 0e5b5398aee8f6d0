"""Saved data: rows of batches, or documents that can be read as an inform."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
from ed_data import DataError, Inform, build_loader, read_rows, save_mixture
from ed_data.config import Saving
from pydantic import ValidationError

ROWS = [{"content": f"text {i}", "id": i, "unused": "x"} for i in range(20)]


def documents_options(jsonl, tmp_path, **save):
    return {
        "informs": [{"data_files": jsonl(ROWS), "additional_fields": ["id"], "name": "mine"}],
        "pack_tokens": False,
        "save": {"path": tmp_path / "out", **save},
    }


@pytest.mark.proves(
    "mixture.save", "mixture.save.path", "mixture.save.format", "mixture.save.compression"
)
@pytest.mark.parametrize(
    "options",
    [
        {"format": "parquet"},
        {"format": "parquet", "compression": "zstd"},
        {"format": "json"},
        {"format": "jsonl", "compression": "gzip"},
        {"format": "arrow", "compression": "lz4"},
    ],
)
def test_saved_documents_can_be_read_again(mixture, jsonl, tmp_path, tokenizer, options):
    made = mixture(**documents_options(jsonl, tmp_path, **options))
    (path,) = save_mixture(made, tokenizer)
    rows = list(read_rows(Inform(data_files=path, content_field="text")))
    assert [row["text"] for row in rows] == [row["content"] for row in ROWS]
    assert rows[3] == {
        "text": "text 3",
        "id": 3,
        "source": "mine",
        "input_ids": [*tokenizer("text 3")["input_ids"], tokenizer.eos_token_id],
    }
    again = mixture(informs=[{"data_files": path, "content_field": "input_ids"}])
    first = mixture(ROWS)
    assert np.array_equal(
        build_loader(again, tokenizer).batch_at(0)["input_ids"],
        build_loader(first, tokenizer).batch_at(0)["input_ids"],
    )


@pytest.mark.proves("mixture.text_target_field", "mixture.tokenization.output_field")
def test_saved_columns_use_configured_names(mixture, jsonl, tmp_path, tokenizer):
    made = mixture(
        **documents_options(jsonl, tmp_path),
        text_target_field="body",
        tokenization={"output_field": "tokens"},
    )
    (path,) = save_mixture(made, tokenizer)
    assert pq.read_table(path).column_names == ["body", "id", "source", "tokens"]


def test_saved_packed_rows_equal_loader_rows(mixture, tokenizer, tmp_path):
    made = mixture(save={"path": tmp_path / "out"})
    loader = build_loader(made, tokenizer, batch_size=4)  # building a training loader saves
    table = pq.read_table(tmp_path / "out" / "train-00000-of-00001.parquet")
    assert table.num_rows == loader.stats["rows"]
    for name, values in loader.batch_at(0).items():
        assert table[name].to_pylist()[:4] == values.tolist()


@pytest.mark.proves("mixture.save.overwrite")
def test_equal_save_is_kept_and_different_data_is_rejected(mixture, tokenizer, tmp_path):
    out = {"path": tmp_path / "out"}
    build_loader(mixture(save=out), tokenizer, batch_size=4)
    (file,) = (tmp_path / "out").glob("*.parquet")
    before = file.stat().st_mtime_ns
    build_loader(mixture(save=out), tokenizer, batch_size=4)
    assert file.stat().st_mtime_ns == before
    with pytest.raises(DataError, match="overwrite: true"):
        build_loader(mixture(save=out, seed=3), tokenizer, batch_size=4)
    build_loader(mixture(save={**out, "overwrite": True}, seed=3), tokenizer, batch_size=4)
    assert json.loads((tmp_path / "out" / ".ed_data.json").read_text())["files"] == [file.name]


@pytest.mark.proves("mixture.save.num_shards")
def test_save_writes_configured_number_of_shards(mixture, tmp_path, tokenizer):
    texts = [f"text {i}" for i in range(200)]
    made = mixture(texts, pack_tokens=False, save={"path": tmp_path / "out", "num_shards": 3})
    paths = save_mixture(made)
    assert len(paths) == 3
    rows = [row for path in paths for row in read_rows(Inform(data_files=path))]
    assert sorted(row["text"] for row in rows) == sorted(texts)


@pytest.mark.proves("mixture.save.max_shard_size")
@pytest.mark.parametrize("options", [{"format": "parquet"}, {"format": "jsonl"}])
def test_shards_with_maximum_size_form_a_dataset(mixture, jsonl, tmp_path, tokenizer, options):
    """The shards are in the order of the rows, and `datasets` loads the folder."""
    import datasets

    draw = random.Random(0)
    rows = [{"content": f"{i} {draw.getrandbits(256):x}"} for i in range(5000)]
    save = {"path": tmp_path / "out", "max_shard_size": "100KB", **options}
    made = mixture(informs=[{"data_files": jsonl(rows)}], pack_tokens=False, save=save)
    paths = save_mixture(made)
    assert len(paths) > 1 and paths == sorted(paths)
    assert paths[0].endswith(f"train-00000-of-{len(paths):05d}.{options['format']}")
    theirs = datasets.load_dataset(
        str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "hf")
    )
    assert theirs["text"] == [row["content"] for row in rows]
    ours = read_rows(Inform(data_files=tmp_path / "out", type=options["format"]))
    assert [row["text"] for row in ours] == theirs["text"]


def test_invalid_shard_size_raises_validation_error(tmp_path):
    with pytest.raises(ValidationError, match="such as '500MB'"):
        Saving(path="x", max_shard_size="much")
    with pytest.raises(ValidationError, match="exclude each other"):
        Saving(path="x", max_shard_size=1000, num_shards=2)


def test_failed_save_leaves_no_files(mixture, tmp_path, tokenizer):
    rows = [{"content": "a", "k": 1}, {"content": "b", "k": "one"}]
    made = mixture(
        rows,
        pack_tokens=False,
        save={"path": tmp_path / "out"},
    )
    made = made.replace(informs=[made.informs[0].replace(additional_fields=["k"])])
    with pytest.raises(DataError, match="use format json"):
        save_mixture(made)
    assert not list(tmp_path.glob("out*"))
    with pytest.raises(DataError, match=r"mixture\.save\.path"):
        save_mixture(mixture())


def test_concurrent_saves_of_equal_data_keep_one_folder(mixture, tokenizer, tmp_path, monkeypatch):
    """The other process finishes while this process is writing."""
    import ed_data.save

    made = mixture(save={"path": tmp_path / "out"})
    original, calls = ed_data.save._write_shards, []

    def write(*arguments):
        names = original(*arguments)
        calls.append(names)
        if len(calls) == 1:
            build_loader(made, tokenizer, batch_size=4)
        return names

    monkeypatch.setattr(ed_data.save, "_write_shards", write)
    build_loader(made, tokenizer, batch_size=4)
    assert len(calls) == 2
    assert [path.name for path in tmp_path.glob("out*")] == ["out"]
    assert not [path for path in (tmp_path / "out").iterdir() if path.is_dir()]


class Hub:
    """Records the calls of `huggingface_hub.HfApi`."""

    calls: list = []  # noqa: RUF012
    error: Exception | None = None

    def create_repo(self, repo_id, **options):
        if Hub.error is not None:
            raise Hub.error
        Hub.calls.append(("create_repo", repo_id, options))
        return SimpleNamespace(repo_id=f"me/{repo_id}")

    def upload_folder(self, *, repo_id, folder_path, **options):
        names = sorted(p.name for p in Path(folder_path).iterdir())
        Hub.calls.append(("upload_folder", repo_id, names, options))


@pytest.mark.proves(
    "mixture.save.push_to_hub", "mixture.save.hub_repo_id", "mixture.save.hub_private"
)
def test_saved_folder_is_pushed_once(mixture, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr(Hub, "calls", [])
    monkeypatch.setattr(Hub, "error", None)
    save = {"path": str(tmp_path / "out"), "push_to_hub": True, "hub_repo_id": "sheep"}
    made = mixture(save={**save, "hub_private": True})
    build_loader(made, tokenizer)
    build_loader(made, tokenizer)
    created, uploaded = Hub.calls
    assert created == (
        "create_repo",
        "sheep",
        {"repo_type": "dataset", "private": True, "exist_ok": True},
    )
    names = [".ed_data.json", "train-00000-of-00001.parquet"]
    assert uploaded[:3] == ("upload_folder", "me/sheep", names)
    assert uploaded[3]["repo_type"] == "dataset"
    assert uploaded[3]["ignore_patterns"] == [".ed_data.json"]
    build_loader(made.replace(save={**save, "hub_repo_id": "goats"}), tokenizer)
    assert [call[1] for call in Hub.calls[2:]] == ["goats", "me/goats"]


def test_failed_hub_push_keeps_local_files_and_raises_error(
    mixture, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr(Hub, "calls", [])
    monkeypatch.setattr(Hub, "error", OSError("401 Unauthorized"))
    made = mixture(save={"path": str(tmp_path / "out"), "push_to_hub": True, "hub_repo_id": "x"})
    with pytest.raises(DataError, match=r"is complete, but cannot be pushed.*401.*log in"):
        build_loader(made, tokenizer)
    assert len(list((tmp_path / "out").glob("*.parquet"))) == 1
    monkeypatch.setattr(Hub, "error", None)
    build_loader(made, tokenizer)  # nothing is written again
    assert [call[0] for call in Hub.calls] == ["create_repo", "upload_folder"]
    for options, says in (
        ({"path": "out", "push_to_hub": True}, "push_to_hub requires the id"),
        ({"path": "s3://a/b", "push_to_hub": True, "hub_repo_id": "x"}, "requires a local folder"),
    ):
        with pytest.raises(ValidationError, match=says):
            Saving(**options)
