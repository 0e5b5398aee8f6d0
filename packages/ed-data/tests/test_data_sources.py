"""Readers of all formats, for files that the libraries of the formats wrote."""

from __future__ import annotations

import csv
import gzip
import json
import re
from types import SimpleNamespace

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ed_data import DataError, Inform, build_loader, read_rows
from ed_data.sources import open_source
from pydantic import ValidationError

ROWS = [{"text": f"line {i}\nwith “more”", "id": i} for i in range(5)]


def rows_of(**inform):
    return list(read_rows(Inform(**inform)))


def error_of(**inform) -> str:
    with pytest.raises(DataError) as error:
        rows_of(**inform)
    return str(error.value)


def test_json_lines_are_read_plain_and_compressed(tmp_path):
    text = "\n".join(json.dumps(row) for row in ROWS) + "\n\n"
    (tmp_path / "a.jsonl").write_text(text)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as stream:
        stream.write(text)
    assert rows_of(data_files=tmp_path / "a.jsonl") == ROWS
    assert rows_of(data_files=tmp_path / "a.jsonl.gz") == ROWS


def test_json_list_with_byte_order_mark_is_read(tmp_path):
    (tmp_path / "a.json").write_text("\n " + json.dumps(ROWS, indent=1), encoding="utf-8-sig")
    assert rows_of(data_files=tmp_path / "a.json") == ROWS


@pytest.mark.proves("mixture.informs.data_files")
def test_globs_are_sorted_and_lists_keep_their_order(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}))
    assert [r["text"] for r in rows_of(data_files=f"{tmp_path}/*.jsonl")] == ["a", "b", "c"]
    files = [f"{tmp_path}/c.jsonl", f"{tmp_path}/a.jsonl"]
    assert [r["text"] for r in rows_of(data_files=files)] == ["c", "a"]
    named = {"train": files[0], "test": files[1]}
    assert [r["text"] for r in rows_of(data_files=named, split="test")] == ["a"]


@pytest.mark.proves("mixture.informs.num_rows")
def test_num_rows_limits_rows_read(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    assert rows_of(data_files=tmp_path / "a.jsonl", num_rows=2) == ROWS[:2]


@pytest.mark.parametrize(("suffix", "delimiter"), [(".csv", ","), (".tsv", "\t")])
def test_csv_and_tsv_files_are_read_with_long_fields(tmp_path, suffix, delimiter):
    before = csv.field_size_limit()
    long = [*ROWS, {"text": "x" * 200_000, "id": 9}]
    with open(tmp_path / f"a{suffix}", "w", newline="") as stream:
        writer = csv.DictWriter(stream, ["text", "id"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(long)
    found = rows_of(data_files=tmp_path / f"a{suffix}")
    assert found == [{"text": r["text"], "id": str(r["id"])} for r in long]
    assert csv.field_size_limit() == before


def test_concurrent_readers_accept_long_csv_values(tmp_path):
    """The first reader to finish does not restore the limit of the other."""
    import csv

    for name, count in (("a.csv", 1), ("b.csv", 3)):
        (tmp_path / name).write_text("text\n" + f"{'x' * 200_000}\n" * count)
    before = csv.field_size_limit()
    long = iter(read_rows(Inform(data_files=tmp_path / "b.csv")))
    next(long)
    assert len(list(read_rows(Inform(data_files=tmp_path / "a.csv")))) == 1
    assert len(list(long)) == 2
    assert csv.field_size_limit() == before


@pytest.mark.proves("mixture.informs.sample_by")
def test_txt_is_read_by_line_paragraph_or_document(tmp_path):
    text = "one\ntwo\n\nthree\n"
    (tmp_path / "a.txt").write_text(text)

    def texts(**options):
        rows = rows_of(data_files=tmp_path / "a.txt", content_field="t", **options)
        return [row["t"] for row in rows]

    assert texts() == ["one", "two", "", "three"]
    assert texts(sample_by="paragraph") == ["one\ntwo", "three"]
    assert texts(sample_by="document") == [text]


def test_parquet_and_both_arrow_layouts_are_read(tmp_path):
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    with pa.ipc.new_file(tmp_path / "file.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    with pa.ipc.new_stream(tmp_path / "stream.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    for name in ("a.parquet", "file.arrow", "stream.arrow"):
        inform = Inform(data_files=tmp_path / name)
        assert list(read_rows(inform)) == ROWS
        only = [row for _, row in open_source(inform).rows(["id"])]
        assert only == [{"id": row["id"]} for row in ROWS]


@pytest.mark.proves("mixture.informs.dataset_split_name", "mixture.informs.type")
def test_hugging_face_folders_are_read_by_split(tmp_path):
    import datasets

    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=data, test=data.select([3])).save_to_disk(tmp_path / "two")
    assert rows_of(type="huggingface", data_files=tmp_path / "one") == ROWS
    two = {"type": "huggingface", "data_files": tmp_path / "two"}
    assert rows_of(**two) == ROWS
    assert rows_of(**two, split="test") == [ROWS[3]]
    assert rows_of(**two, dataset_split_name="test") == [ROWS[3]]
    assert "did you mean 'train'" in error_of(**two, split="trian")
    assert "cannot load dataset" in error_of(type=f"{tmp_path}/three")


def test_python_objects_are_read_as_rows(monkeypatch):
    import sys

    module = SimpleNamespace(
        text="one", many=["a", "b"], named={"x": "y"}, rows=[{"content": "c", "k": 1}], wrong=3
    )
    monkeypatch.setitem(sys.modules, "some_texts", module)

    def rows(name):
        return rows_of(type="python", data_files=f"some_texts:{name}")

    assert rows("text") == [{"content": "one"}]
    assert rows("many") == [{"content": "a"}, {"content": "b"}]
    assert rows("named") == [{"name": "x", "content": "y"}]
    assert rows("rows") == [{"content": "c", "k": 1}]
    assert "it is a int" in error_of(type="python", data_files="some_texts:wrong")
    assert "cannot import" in error_of(type="python", data_files="some_texts:absent")
    assert "cannot import" in error_of(type="python", data_files="no_such_module:x")


def test_python_source_reads_text_of_the_standard_library():
    topics = rows_of(type="python", data_files="pydoc_data.topics:topics")
    assert len(topics) > 50
    assert all(len(row["content"]) > 100 for row in topics)


def test_remote_files_are_read_and_copied_once(tmp_path):
    fs = fsspec.filesystem("memory")
    fs.pipe("/ed_data_test/a.jsonl", b'{"text": "far"}\n')
    inform = Inform(data_files="memory://ed_data_test/*.jsonl")
    try:
        assert list(read_rows(inform)) == [{"text": "far"}]
        kept = str(tmp_path / "files")
        source = open_source(inform, kept)
        assert [row for _, row in source.rows()] == [{"text": "far"}]
        copies = list((tmp_path / "files").rglob("*.jsonl"))
        assert len(copies) == 1
        copies[0].write_text('{"text": "near"}\n')  # proves that the copy is read
        assert [row for _, row in source.rows()] == [{"text": "near"}]
        fs.pipe("/ed_data_test/a.jsonl", b'{"text": "changed"}\n')
        assert list(read_rows(inform, kept)) == [{"text": "changed"}]
    finally:
        fs.rm("/ed_data_test", recursive=True)


def test_rewritten_file_changes_the_fingerprint(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    first = open_source(Inform(data_files=path)).fingerprint
    assert open_source(Inform(data_files=path)).fingerprint == first
    path.write_text("three")
    assert open_source(Inform(data_files=path)).fingerprint != first


def test_folder_source_reads_all_matching_files(tmp_path):
    for name in ("b.jsonl", "a/c.json.gz", ".hidden/d.jsonl", "e.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        text = json.dumps({"content": name}).encode()
        path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    rows = read_rows(Inform(type="json", data_files=tmp_path))
    assert [row["content"] for row in rows] == ["a/c.json.gz", "b.jsonl"]
    with pytest.raises(ValidationError, match="does not determine its type"):
        Inform(data_files=tmp_path)


def test_missing_file_error_suggests_existing_files(tmp_path):
    (tmp_path / "train.jsonl").write_text("{}")
    text = error_of(data_files=tmp_path / "trian.jsonl")
    assert "no file matches" in text
    assert "did you mean 'train.jsonl'" in text
    assert "does not exist" in error_of(data_files=tmp_path / "no" / "x.jsonl")
    assert "contains no file that ends with .csv" in error_of(type="csv", data_files=tmp_path)
    assert "cannot open" in error_of(data_files="nowhere://x/a.jsonl")


def test_error_names_missing_package_of_compression(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl.zst").write_bytes(b"")
    monkeypatch.setattr("ed_data.sources.formats.infer_compression", lambda path: None)
    assert "zstandard" in error_of(data_files=tmp_path / "a.jsonl.zst")


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', r"a\.jsonl:2: not JSON"),
        ("a.jsonl", b'{"a": 1}\n[1]\n', r"a\.jsonl:2: the line is a list"),
        ("a.json", b'[{"a": 1}, 3]', "item 1 is a int"),
        ("a.json", b"[{]", r"a\.json:1: not JSON"),
        ("a.csv", b"a,b\n1,2,3\n", r"a\.csv:2: more values than the 2 columns"),
        ("a.csv", b"a,b\n1,2\n\n3\n", r"a\.csv:4: fewer values.*'b' has none"),
        ("a.jsonl", b'\n\n{"a": \n', r"a\.jsonl:3: not JSON"),
        ("a.txt", b"\xff\xfe\x00x", "not UTF-8"),
        ("a.parquet", b"not parquet at all", "not a parquet file"),
        ("a.arrow", b"not arrow at all", "not an arrow file"),
        ("a.jsonl.gz", b"not gzip", "cannot be read"),
    ],
)
def test_broken_files_raise_error_with_location(tmp_path, name, data, says):
    (tmp_path / name).write_bytes(data)
    assert re.search(says, error_of(data_files=tmp_path / name))


class _Bucket:
    """A source without files, such as an object store."""

    fingerprint = "bucket:1"

    def __init__(self, inform, file_cache):
        self._name = inform.data_files

    def rows(self, columns=None):
        for index in range(3):
            yield f"{self._name}, object {index}", {"content": f"text {index}"}


def test_new_kind_of_source_needs_one_entry(monkeypatch, mixture, tokenizer):
    import sys

    from ed_data import check_names, texts
    from ed_data.config.source import KINDS, Kind

    monkeypatch.setitem(sys.modules, "my_bucket", SimpleNamespace(Bucket=_Bucket))
    monkeypatch.setitem(KINDS, "bucket", Kind("my_bucket:Bucket", aliases=("s3",)))
    made = mixture(informs=[{"type": "S3", "data_files": "s3://mine/x"}], pack_tokens=False)
    assert made.informs[0].label == "s3://mine/x"
    assert check_names(made) == []
    assert list(texts(made)) == ["text 0", "text 1", "text 2"]
    assert build_loader(made, tokenizer, seq_length=16).stats["documents"] == 3
    with pytest.raises(ValidationError, match="did you mean 'bucket'"):
        Inform(type="buckt", data_files="x")
    with pytest.raises(ValidationError, match="requires one string"):
        Inform(type="bucket", data_files=["x"])


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "a.parquet", "a.arrow"])
def test_row_place_contains_file_and_line(tmp_path, name):
    table = pa.Table.from_pylist([{"text": "one"}, {"text": "two"}])
    path = tmp_path / name
    if name == "a.parquet":
        pq.write_table(table, path)
    elif name == "a.arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    else:
        path.write_text(
            {
                "a.jsonl": '\n{"text": "one"}\n{"text": "two"}\n',
                "a.json": '[{"text": "one"}, {"text": "two"}]',
                "a.csv": '"text"\n"one"\n"two"\n',
                "a.txt": "\none\n\ntwo\n",
            }[name]
        )
    options = {"sample_by": "paragraph"} if name == "a.txt" else {}
    rows = open_source(Inform(data_files=path, content_field="text", **options)).rows()
    expected = {
        "a.jsonl": [":2", ":3"],
        "a.csv": [":2", ":3"],
        "a.txt": [":2", ":4"],
        "a.json": [", item 0", ", item 1"],
    }.get(name, [", row 0", ", row 1"])
    assert [place for place, _ in rows] == [f"{path}{end}" for end in expected]


def test_copy_of_remote_file_keeps_the_original_name(tmp_path):
    fs = fsspec.filesystem("memory")
    fs.pipe("/ed_data_test/b.jsonl", b'{"text": \n')
    inform = Inform(data_files="memory://ed_data_test/b.jsonl")
    try:
        with pytest.raises(DataError, match=r"^memory://.*b\.jsonl:1: not JSON"):
            list(read_rows(inform, str(tmp_path / "files")))
    finally:
        fs.rm("/ed_data_test", recursive=True)


class _Flaky:
    """A stream whose first reads fail, like a broken connection."""

    def __init__(self, stream, broken: list[int]):
        self._stream, self._broken = stream, broken

    def readline(self, size=-1):
        if self._broken and self._stream.tell() > 30:
            self._broken.pop()
            raise ConnectionResetError("the connection broke")
        return self._stream.readline(size)

    def seek(self, offset):
        return self._stream.seek(offset)

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self._stream.close()


def test_broken_connection_resumes_at_interrupted_row(monkeypatch):
    from ed_data.sources.files import FileCache
    from ed_data.sources.formats import SourceFile

    fs = fsspec.filesystem("memory")
    rows = [{"text": f"row {i}"} for i in range(20)]
    fs.pipe("/ed_data_flaky/a.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    waited, opened = [], SourceFile.open
    monkeypatch.setattr("ed_data.sources.files.time.sleep", waited.append)
    broken: list[int] = []
    monkeypatch.setattr(SourceFile, "open", lambda file: _Flaky(opened(file), broken))
    inform = Inform(data_files="memory://ed_data_flaky/a.jsonl")
    try:
        broken[:] = [1, 1]
        assert list(read_rows(inform, FileCache(None, retries=2, delay=3.0))) == rows
        assert waited == [3.0, 6.0]
        broken[:] = [1, 1]
        with pytest.raises(DataError, match="the connection broke"):
            list(read_rows(inform, FileCache(None, retries=1)))
    finally:
        fs.rm("/ed_data_flaky", recursive=True)


def test_copy_expires_and_failed_download_is_repeated(tmp_path, monkeypatch):
    import os
    import time

    from ed_data.sources.files import FileCache, local_copy, resolve_files

    fs = fsspec.filesystem("memory")
    fs.pipe("/ed_data_old/a.txt", b"far\n")
    fetched, failures, fetch = [], [1], fs.get_file

    def get_file(path, target):
        if failures:
            failures.pop()
            raise RuntimeError("busy")
        fetched.append(path)
        fetch(path, target)

    monkeypatch.setattr(fs, "get_file", get_file)
    monkeypatch.setattr("ed_data.sources.files.time.sleep", lambda seconds: None)
    try:
        (file,) = resolve_files("memory://ed_data_old/a.txt", "x")
        kept = FileCache(str(tmp_path), retries=1, expiry=100.0)
        copy = local_copy(file, kept)
        assert len(fetched) == 1 and not failures
        local_copy(file, kept)
        assert len(fetched) == 1
        os.utime(copy.path, (time.time() - 200,) * 2)
        local_copy(file, FileCache(str(tmp_path)))  # without an expiry the copy is kept
        assert len(fetched) == 1
        local_copy(file, kept)
        assert len(fetched) == 2
        failures[:] = [1, 1]
        with pytest.raises(DataError, match="cannot be downloaded: busy"):
            local_copy(file, FileCache(str(tmp_path / "other"), retries=1))
        assert list((tmp_path / "other").rglob("*.*")) == []
    finally:
        fs.rm("/ed_data_old", recursive=True)


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.csv", "a.txt", "b.txt", "a.parquet", "a.arrow"]
)
def test_reading_resumes_at_any_row(tmp_path, name):
    rows = [{"text": f"row {i}" + "\nmore" * (i % 3) * (name != "a.txt")} for i in range(11)]
    path = tmp_path / name
    table = pa.Table.from_pylist(rows)
    lines = "\n\n" + "\n".join(map(json.dumps, rows))
    if name == "a.parquet":
        pq.write_table(table, path, row_group_size=4)
    elif name == "a.arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    elif name == "a.jsonl.gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif name == "a.csv":
        with open(path, "w", newline="", encoding="utf-8-sig") as stream:
            writer = csv.DictWriter(stream, ["text"])
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text(
            {
                "a.jsonl": lines,
                "a.json": "\n" + json.dumps(rows),
                "a.txt": "\n".join(row["text"] for row in rows),
                "b.txt": "\n\n".join(row["text"] for row in rows),
            }[name]
        )
    options = {"sample_by": "paragraph"} if name == "b.txt" else {}
    source = open_source(Inform(data_files=path, content_field="text", **options))
    whole = list(source.records(0))
    assert [record.row for record in whole] == rows
    for number, record in enumerate(whole):
        assert list(source.records(0, start=record.at)) == whole[number:]
        assert list(source.records(0, start=record.next_spot)) == whole[number + 1 :]
