"""Invalid input: errors name the location, and dropped rows are counted."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import re
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ed_data import DataError, Inform, Mixture, build_loader, check_names, documents, read_rows
from ed_data.rows.documents import Documents
from ed_data.sources.parquet_footers import ColumnChunk, read_column_chunks
from pydantic import ValidationError

GOOD = b'{"content": "good"}\n'


def error_of(path, **options) -> str:
    with pytest.raises(DataError) as error:
        list(read_rows(Inform(data_files=path, **options)))
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.csv", b"a,b\n1\n", r"a\.csv:2: fewer values.*'b' has none"),
        ("a.csv", b'a,b\n1,"2\n3,4\n', r"a\.csv:2: unexpected end of data.*up to line 3"),
        ("a.csv", b'a,b\n1,"2"x\n3,4\n', r"a\.csv:2: .*expected after"),
        ("a.csv", b"a,b\n1,2\0\n", r"a\.csv:2: a NUL byte"),
        ("a.csv", b"a,a\n1,2\n", r"a\.csv:1: two columns have the name 'a'"),
        ("a.csv", b"a,b\n1,\xff\n", r"a\.csv:2: not UTF-8"),
        (
            "a.jsonl",
            GOOD + b'{"content": "x", "content": "y"}\n',
            r":2: .*'content' occurs twice",
        ),
        ("a.jsonl", GOOD + b'{"a": {"b": 1, "b": 2}}\n', r":2: .*'b' occurs twice"),
        ("a.json", b'[{"a": 1, "a": 2}]', r"a\.json.*'a' occurs twice"),
        ("a.jsonl", GOOD + b'{"a": NaN}\n', r":2: .*NaN is not a JSON value"),
        ("a.jsonl", GOOD + b'{"a": 1e999}\n', r":2: .*1e999 is too large"),
        ("a.json", b'[{"a": -Infinity}]', r"-Infinity is not a JSON value"),
        ("a.jsonl", GOOD + b'{"a": "\xe9"}\n', r":2: not UTF-8 text.*on_error"),
        ("a.jsonl", GOOD + b'{"a": "\0"}\n', r":2: a NUL byte"),
        ("a.jsonl", GOOD + b"[" * 100_000 + b"\n", r":2: not JSON.*recursion"),
        ("a.txt", b"one\ntw\0o\n", r"a\.txt:2: a NUL byte"),
        ("a.txt", "one".encode("utf-16"), r"a\.txt:1: not UTF-8"),
        ("a.parquet", b"", "not a parquet file"),
        ("a.jsonl.gz", gzip.compress(GOOD * 1000, mtime=0)[:-20], r"a\.jsonl\.gz cannot be read"),
    ],
)
def test_broken_file_error_contains_location(tmp_path, name, data, says):
    (tmp_path / name).write_bytes(data)
    assert re.search(says, error_of(tmp_path / name))


#: Endings of files of columns, and their types.
COLUMNS = {"parquet": "parquet", "arrow": "arrow", "stream": "arrow"}


def compress_rows(suffix: str) -> bytes:
    """Return rows in an archive, or in a file of columns."""
    if suffix == "zip":
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("ä.jsonl", GOOD)
        return buffer.getvalue()
    if suffix in COLUMNS:
        table = pa.table({"content": ["good"] * 3, "more": [[1], [2, 3], []]})
        sink = pa.BufferOutputStream()
        if suffix == "parquet":
            pq.write_table(table, sink, compression="none")
        else:
            create = pa.ipc.new_file if suffix == "arrow" else pa.ipc.new_stream
            with create(sink, table.schema) as writer:
                writer.write(table)
        return sink.getvalue().to_pybytes()
    return {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}[suffix](GOOD)


SUFFIXES = ("zip", "gz", "bz2", "xz", *COLUMNS)


def read_damaged(folder, suffix: str, step: int, values: tuple[int, ...]) -> None:
    """Replace every byte at a multiple of `step` by each value, and read the rows."""
    path, data = folder / f"a.jsonl.{suffix}", compress_rows(suffix)
    kind = COLUMNS.get(suffix, "json")
    messages = []
    for position in range(0, len(data), step):
        for value in values:
            path.write_bytes(data[:position] + bytes([value]) + data[position + 1 :])
            try:
                list(read_rows(Inform(data_files=path, type=kind)))
            except DataError as error:
                messages.append(str(error))
    assert messages and all(path.name in message for message in messages)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_damaged_bytes_of_an_archive_are_an_error_with_its_name(tmp_path, suffix):
    read_damaged(tmp_path, suffix, 1 if suffix == "zip" else 16, (0xFF,))


@pytest.mark.nightly
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_each_damaged_byte_of_an_archive_is_an_error_with_its_name(tmp_path, suffix):
    read_damaged(tmp_path, suffix, 1, (0, 1, 0x7F, 0x80, 0xFF))


def get_column_chunks(data: bytes) -> list[ColumnChunk]:
    """Return what pyarrow says about the columns of an undamaged file."""
    metadata = pq.ParquetFile(io.BytesIO(data)).metadata
    groups = [metadata.row_group(place) for place in range(metadata.num_row_groups)]
    columns = [group.column(place) for group in groups for place in range(group.num_columns)]
    kinds = ("BOOLEAN", "INT32", "INT64", "INT96", "FLOAT", "DOUBLE", "BYTE_ARRAY")
    return [
        ColumnChunk(
            column.path_in_schema,
            kinds.index(column.physical_type),
            column.total_uncompressed_size,
            column.total_compressed_size,
            column.data_page_offset,
            column.dictionary_page_offset,
        )
        for column in columns
    ]


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("use_dictionary", [True, False])
def test_columns_of_a_footer_equal_those_of_pyarrow(compression, use_dictionary):
    rows = [{"text": "ä" * i, "n": i, "turns": [{"role": "user", "x": 0.5}] * i} for i in range(50)]
    sink = io.BytesIO()
    table = pa.Table.from_pylist(rows).replace_schema_metadata({"note": "more"})
    options = {"compression": compression, "use_dictionary": use_dictionary, "row_group_size": 20}
    pq.write_table(table, sink, **options)
    chunks = read_column_chunks(sink)
    assert len(chunks) == 3 * 4
    assert chunks == get_column_chunks(sink.getvalue())


def test_each_damaged_byte_of_a_footer_ends_no_process():
    """pyarrow 25 ends the process for some of them in `RowGroupMetaData.column`."""
    data, failures = compress_rows("parquet"), 0
    for position in range(len(data) - 8 - int.from_bytes(data[-8:-4], "little"), len(data)):
        for value in (0, data[position] ^ 1, 0xFF):
            damaged = data[:position] + bytes([value]) + data[position + 1 :]
            try:
                read_column_chunks(io.BytesIO(damaged))
            except ValueError:
                failures += 1
    assert failures > 100


@pytest.mark.parametrize("content", [b"\x1c" * 99, b"\x19\xfc\xff\xff\xff\xff\x0f", b"\x19" * 9])
def test_footer_of_nested_or_endless_values_is_an_error(content):
    with pytest.raises(ValueError, match="the footer"):
        read_column_chunks(io.BytesIO(content + len(content).to_bytes(4, "little") + b"PAR1"))


def test_truncated_or_damaged_parquet_file_raises_error_with_file_name(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"content": ["text"] * 5000}), path, row_group_size=1000)
    path.write_bytes(path.read_bytes()[:-100])
    assert "a.parquet is not a parquet file, or is truncated" in error_of(path)
    pq.write_table(pa.table({"content": [str(i) for i in range(5000)]}), path, row_group_size=1000)
    data = bytearray(path.read_bytes())
    data[2000:6000] = bytes(4000)  # damaged in the middle
    path.write_bytes(data)
    assert "a.parquet" in error_of(path)


def test_lone_surrogates_raise_data_error(jsonl):
    path = jsonl([{"content": "half \ud800"}])
    with pytest.raises(DataError, match=r":1, content_field: .*'\\ud800' at character 5 is half"):
        list(documents(Inform(data_files=path)))
    for said in ("\udc00", [{"type": "text", "text": "\udc00"}]):
        path = jsonl([{"content": [{"role": "user", "content": said}]}])
        with pytest.raises(DataError, match="half of a surrogate pair"):
            list(documents(Inform(data_files=path)))


@pytest.mark.proves("mixture.informs.on_error")
def test_bad_rows_can_be_skipped_and_are_counted(mixture, tokenizer, tmp_path, caplog):
    path = tmp_path / "bad.jsonl"
    lines = [
        b'{"content": "one"}',
        b'{"content": ',
        b'{"content": "\xff"}',
        b'{"content": "two"}',
        b'{"content": 3}',
        b'{"contents": "x"}',
        b'{"content": null}',
        b'{"content": " "}',
        b'{"content": [1, 99999]}',
        b'{"content": "three"}',
    ]
    path.write_bytes(b"\n".join(lines))
    inform = {"data_files": path, "on_error": "skip"}
    expected = {
        "skipped, because of an error": 5,
        "'content' is null": 1,
        "'content' is empty": 1,
    }
    batches = []
    for on_the_fly in (False, True, False):  # cached, on the fly, and from the cache
        caplog.clear()
        made = mixture(informs=[inform], pack_on_the_fly=on_the_fly)
        loader = build_loader(made, tokenizer)
        batches.append(loader.batch_at(0))
        assert loader.stats["sources"]["bad"]["dropped"] == expected
        text = tokenizer.decode(batches[-1]["input_ids"][batches[-1]["segment_ids"] > 0])
        assert sorted(re.findall(r"one|two|three", text)) == ["one", "three", "two"]
        if not on_the_fly:
            assert "5 rows: skipped" in caplog.text
            assert "bad.jsonl:2: not JSON" in caplog.text
    assert all(
        np.array_equal(batches[0][key], other[key]) for other in batches for key in batches[0]
    )
    with pytest.raises(DataError, match=r"bad\.jsonl:2: not JSON"):
        build_loader(mixture(informs=[{"data_files": path}]), tokenizer)


def test_skipping_continues_after_each_kind_of_error(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'a,b\n1,2\n3\n4,\xff\n5,"6"x\n7,8\n9,"10\n')
    read = Documents(Inform(data_files=tmp_path / "a.csv", content_field="b", on_error="skip"))
    assert [d.content for d in read] == ["2", "8"]
    assert sum(read.tally.dropped.values()) == 4
    (tmp_path / "a.txt").write_bytes(b"one\n\xff\n\nthree\n\nf\0r\nx\n")
    for how, texts in (("line", ["one", "three", "x"]), ("paragraph", ["three"])):
        inform = Inform(data_files=tmp_path / "a.txt", sample_by=how, on_error="skip")
        assert [d.content for d in Documents(inform)] == texts


def test_empty_files_are_skipped_unless_all_are_empty(mixture, tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"")
    (tmp_path / "b.jsonl").write_bytes(GOOD)
    informs = [{"data_files": f"{tmp_path}/?.jsonl"}]
    assert build_loader(mixture(informs=informs), tokenizer).stats["documents"] == 1
    (tmp_path / "b.jsonl").write_bytes(b"")
    with pytest.raises(DataError, match=r"has no documents: the source has no rows"):
        build_loader(mixture(informs=informs), tokenizer)
    (tmp_path / "c.csv").write_bytes(b"")
    assert list(read_rows(Inform(data_files=tmp_path / "c.csv"))) == []


def test_empty_data_error_states_reason(mixture, tokenizer):
    with pytest.raises(DataError, match=r"2 rows: 'content' is null \(the first: .*data\.jsonl:1"):
        build_loader(mixture([{"content": None}] * 2), tokenizer)


def test_renaming_to_an_existing_field_raises_data_error(jsonl):
    rows = [{"question": "q", "content": "c"}]
    inform = Inform(data_files=jsonl(rows), format_fields={"question": "content"})
    with pytest.raises(DataError, match=r"renames 'question' to 'content'.*already") as error:
        list(documents(inform))
    assert error.value.path == ("format_fields",)
    swapped = inform.replace(format_fields={"question": "content", "content": "question"})
    assert [d.content for d in documents(swapped)] == ["q"]


def test_text_schema_rejects_prompts_of_preference_rows(mixture, tokenizer, jsonl):
    rows = [{"prompt": "p", "chosen": "c", "rejected": "r"}]
    informs = [{"data_files": jsonl(rows), "content_field": "prompt"}]
    made = mixture(informs=informs)
    (remark,) = check_names(made)
    assert remark[0] == ("informs", 0, "content_field")
    assert "only its 'prompt' would be trained on" in remark[1]
    with pytest.raises(DataError, match="preference pair"):
        build_loader(made, tokenizer)
    chosen = made.replace(informs=[{"data_files": jsonl(rows), "content_field": "chosen"}])
    assert build_loader(chosen, tokenizer).stats["documents"] == 1


USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}


@pytest.mark.parametrize("on_the_fly", [False, True])
def test_data_without_labels_raises_data_error(mixture, tokenizer, on_the_fly):
    options = {
        "tokenization": {"assistant_only_loss": True},
        "pack_on_the_fly": on_the_fly,
        "pack_seq_length": 256,
    }
    with pytest.raises(DataError, match="no token of the first 2 documents has a loss") as error:
        build_loader(mixture([{"content": [USER]}] * 2, **options), tokenizer)
    assert error.value.path == ("tokenization", "assistant_only_loss")
    rows = [{"content": [USER]}, {"content": [USER, ANSWER]}]
    assert build_loader(mixture(rows, **options), tokenizer).stats["documents"] == 2
    # Truncation may remove the answer.
    long = {"role": "user", "content": "hi " * 50}
    options["tokenization"]["max_length"] = 16
    with pytest.raises(DataError, match="truncation removed"):
        build_loader(mixture([{"content": [long, ANSWER]}], **options), tokenizer)


def test_unknown_or_zero_weights_raise_validation_error(jsonl):
    inform = {"data_files": jsonl(), "name": "a"}
    for weights, says in (
        ({"a": 1, "b": 1}, "there is no inform 'b'"),
        ({"a": 0}, "must be greater than 0"),
        ({}, "'a' has no weight"),
    ):
        with pytest.raises(ValidationError, match=says):
            Mixture(informs=[inform], mixture_weights=weights)


def test_unwritable_cache_raises_data_error(mixture, tokenizer, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    made = mixture(cache_dir=str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"the cache folder .* cannot be written") as error:
        build_loader(made, tokenizer)
    assert error.value.path[-1] == "cache_dir"
    assert build_loader(made.replace(pack_on_the_fly=True), tokenizer).batch_at(0)


def test_read_only_cache_is_used(mixture, tokenizer, tmp_path, monkeypatch, caplog):
    made = mixture()
    first = build_loader(made, tokenizer, batch_size=2).batch_at(3)

    def refuse(*args, **options):
        raise PermissionError(13, "Read-only file system")

    monkeypatch.setattr("ed_data.cache._begin", refuse)
    other = made.replace(seed=3)  # needs another plan, but the same tokens
    assert build_loader(other, tokenizer, batch_size=2).stats["documents"] == 60
    assert "the plan of the rows is not cached" in caplog.text
    again = build_loader(made, tokenizer, batch_size=2).batch_at(3)
    assert all(np.array_equal(again[key], first[key]) for key in first)
    with pytest.raises(DataError, match=r"Read-only file system; set mixture\.cache_dir"):
        build_loader(made.replace(pack_eos_token_id=5), tokenizer)


def test_failed_store_leaves_no_files(mixture, tokenizer, tmp_path):
    with pytest.raises(DataError):
        build_loader(mixture([{"content": "a"}, {"content": 3}]), tokenizer)
    left = [f for _, _, files in os.walk(tmp_path / "cache") for f in files]
    assert left == []
