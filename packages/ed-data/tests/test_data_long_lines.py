"""Files that expand: lines, documents, pages and dictionaries have limits."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ed_data.config.source import Inform
from ed_data.errors import DataError
from ed_data.sources import expansion, lines, open_source
from ed_data.sources.expansion import split_rows
from ed_data.sources.lines import Spot
from hypothesis import given
from hypothesis import strategies as st


def test_too_long_line_is_an_error_and_the_next_line_is_read(monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE", 1000)
    packed = gzip.compress(b"first\n" + b"x" * 3_000_000 + b"\nlast\n")
    read = lines.Lines(gzip.GzipFile(fileobj=io.BytesIO(packed)), "a.jsonl.gz")
    assert next(read) == "first\n"
    with pytest.raises(DataError, match=r"a\.jsonl\.gz:2: the line has 1000 bytes or more"):
        next(read)
    spot = read.spot
    assert next(read) == "last\n"
    again = lines.Lines(gzip.GzipFile(fileobj=io.BytesIO(packed)), "a.jsonl.gz", spot)
    assert [*again] == ["last\n"]


def test_too_large_document_raises_data_error(monkeypatch):
    monkeypatch.setattr(lines, "MAX_REST", 1000)
    packed = gzip.compress(b"[" + b" " * 3_000_000 + b"]")
    with pytest.raises(DataError, match="1000 bytes or more"):
        lines.Lines(gzip.GzipFile(fileobj=io.BytesIO(packed)), "a.json.gz").rest()


def zipped(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("rows", content)
    return file.getvalue()


PACK = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zip": zipped}
ROWS = {
    "jsonl": b'{"content": "a"}\n',
    "csv": b"content\n" + b"a" * 15 + b"\n",
    "txt": b"a" * 15 + b"\n",
    "json": b" " * 16,
}


@pytest.mark.daily("jsonl-gz", "csv-zip", "txt-xz", "json-gz")
@pytest.mark.parametrize("pack", PACK)
@pytest.mark.parametrize("form", ROWS)
def test_compressed_file_that_expands_is_an_error_with_its_name(tmp_path, monkeypatch, pack, form):
    """Also where invalid rows are skipped; a smaller file is read."""
    monkeypatch.setattr(expansion, "FREE_BYTES", 2**17)
    path = tmp_path / f"bomb.{form}.{pack}"
    content = b"[" * (form == "json") + ROWS[form] * 2**16
    path.write_bytes(PACK[pack](content))
    kind = {"jsonl": "json"}.get(form, form)
    source = open_source(Inform(type=kind, data_files=str(path), on_error="skip"))
    with pytest.raises(DataError, match=rf"bomb\.{form}\.{pack}: \d+ compressed bytes expand"):
        [*source.records(0)]
    if form != "json":
        path.write_bytes(PACK[pack](ROWS[form] * 2**10))
        rows = [*source.records(0)]
        assert len(rows) >= 2**10
        assert [*source.records(0, start=rows[9].next_spot)] == rows[10:]


def test_expanding_page_is_an_error_with_its_column(tmp_path, monkeypatch):
    monkeypatch.setattr(expansion, "FREE_BYTES", 2**18)
    path = tmp_path / "bomb.parquet"
    table = pa.table({"content": ["a" * 2**20], "other": ["b"]})
    pq.write_table(table, path, compression="zstd", use_dictionary=False)
    source = open_source(Inform(type="parquet", data_files=str(path)))
    with pytest.raises(DataError, match=r"bomb\.parquet: .*the column 'content' expand to"):
        next(source.rows())


def repeated(count: int, size: int) -> pa.DictionaryArray:
    values = pa.array(["a" * size, "b"])
    return pa.DictionaryArray.from_arrays(pa.array([0, 1] * count, pa.int32()), values)


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_entries_of_a_dictionary_are_not_copied_into_all_rows_at_once(tmp_path, monkeypatch, form):
    path, size = tmp_path / f"rows.{form}", 2**24
    table = pa.table({"content": repeated(20_000, size)})
    if form == "parquet":
        pq.write_table(table, path, compression="zstd")
    else:
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    assert path.stat().st_size < 2**25
    parts = []

    def checked(batch):
        for part in split_rows(batch):
            parts.append(part)
            assert part.num_rows * size <= expansion.ROWS_BYTES
            yield part

    monkeypatch.setattr("ed_data.sources.formats.split_rows", checked)
    before = pa.default_memory_pool().bytes_allocated()
    source = open_source(Inform(type=form, data_files=str(path)))
    rows = source.rows()
    assert [len(next(rows)[1]["content"]) for _ in range(4)] == [size, 1, size, 1]
    assert parts
    assert pa.default_memory_pool().bytes_allocated() - before < 2**27


def test_row_that_repeats_an_entry_without_end_is_an_error(tmp_path):
    path = tmp_path / "bomb.arrow"
    lists = pa.ListArray.from_arrays(pa.array([0, 40_000], pa.int32()), repeated(20_000, 2**20))
    table = pa.table({"content": lists})
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table)
    source = open_source(Inform(type="arrow", data_files=str(path)))
    with pytest.raises(DataError, match=r"bomb\.arrow: a row has \d+ bytes"):
        next(source.rows())


@given(st.lists(st.lists(st.sampled_from(["a" * 50, "b", None]), max_size=5), max_size=30))
def test_split_rows_are_the_rows(rows):
    texts = [row[0] if row else None for row in rows]
    batch = pa.record_batch(
        {
            "plain": pa.array(texts, pa.string()),
            "text": pa.array(texts, pa.string()).dictionary_encode(),
            "lists": pa.array(rows, pa.list_(pa.dictionary(pa.int8(), pa.string()))),
            "runs": pa.RunEndEncodedArray.from_arrays([len(rows)], ["a" * 9])
            if rows
            else pa.array([], pa.run_end_encoded(pa.int32(), pa.string())),
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expansion, "ROWS_BYTES", 200)
        parts = [*split_rows(batch)]
    assert [row for part in parts for row in part.to_pylist()] == batch.to_pylist()
    assert len(parts) <= 1 or max(part.num_rows for part in parts) <= 200 // 50


def test_spot_after_a_seek_counts_the_skipped_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(expansion, "FREE_BYTES", 2**18)
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(gzip.compress(ROWS["jsonl"] * 2**17))
    source = open_source(Inform(type="json", data_files=str(path)))
    with pytest.raises(DataError, match="compressed bytes expand"):
        next(source.records(0, start=Spot(2**16, 17 * 2**16)))


def encrypted_zip() -> bytes:
    data = bytearray(zipped(ROWS["jsonl"]))
    for mark, place in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        data[data.index(mark) + place] |= 1
    return bytes(data)


def zip_of_another_method() -> bytes:
    data = bytearray(zipped(ROWS["jsonl"]))
    for mark, place in ((b"PK\3\4", 8), (b"PK\1\2", 10)):
        data[data.index(mark) + place] = 99
    return bytes(data)


@pytest.mark.parametrize(
    "content",
    [b"PK\5\6" + bytes(18), encrypted_zip(), zip_of_another_method(), b"PK\3\4", b""],
    ids=["empty", "encrypted", "method", "short", "nothing"],
)
def test_archive_without_a_readable_file_is_an_error_with_its_name(tmp_path, content):
    path = tmp_path / "rows.jsonl.zip"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"rows\.jsonl\.zip cannot be read: "):
        [*open_source(Inform(type="json", data_files=str(path))).rows()]
