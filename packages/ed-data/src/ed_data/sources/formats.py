"""Readers of one file: json and jsonl, csv and tsv, txt, parquet, arrow. Each yields rows."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ed_data.errors import DataError

if TYPE_CHECKING:
    from ed_data.sources.files import SourceFile

Row = dict[str, Any]
_ARROW_ROWS = 1024  # rows converted to Python at a time


def read_file(
    kind: str,
    file: SourceFile,
    *,
    columns: Sequence[str] | None,
    content_field: str,
    sample_by: str,
) -> Iterator[Row]:
    """Yield the rows of one file.

    Args:
        kind: a key of `ed_data.config.FILE_TYPES`.
        file: what to read.
        columns: the fields that are needed, or None for all; a hint for columnar formats.
        content_field: the name that a text of a txt file gets in its row.
        sample_by: what one row of a txt file is.

    Raises:
        DataError: the file is not of that kind.
    """
    try:
        if kind == "json":
            yield from _json(file)
        elif kind in ("csv", "tsv"):
            yield from _csv(file, "," if kind == "csv" else "\t")
        elif kind == "txt":
            yield from _txt(file, content_field, sample_by)
        elif kind == "parquet":
            yield from _parquet(file, columns)
        else:
            yield from _arrow(file, columns)
    except UnicodeDecodeError as error:
        raise DataError(f"{file.address}: not UTF-8 text: {error}") from error
    except (OSError, EOFError) as error:
        raise DataError(f"{file.address}: cannot be read: {error}") from error


def _text(file: SourceFile, newline: str | None = None) -> io.TextIOWrapper:
    return io.TextIOWrapper(file.open(), encoding="utf-8-sig", newline=newline)


def _json(file: SourceFile) -> Iterator[Row]:
    with _text(file) as stream:
        first = stream.readline()
        while first and not first.strip():
            first = stream.readline()
        if first.lstrip().startswith("["):
            yield from _json_array(file, first + stream.read())
            return
        number, line = 1, first
        while line:
            if line.strip():
                yield _json_row(file, number, line)
            line = stream.readline()
            number += 1


def _json_array(file: SourceFile, text: str) -> Iterator[Row]:
    try:
        items = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{file.address}:{error.lineno}: not JSON: {error.msg}") from error
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise DataError(
                f"{file.address}: item {index} is a {type(item).__name__}; a row is an object"
            )
        yield item


def _json_row(file: SourceFile, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{file.address}:{number}: not JSON: {error.msg}; a json file holds one object a line, "
            "or one list of objects"
        ) from error
    if not isinstance(row, dict):
        raise DataError(
            f"{file.address}:{number}: a {type(row).__name__}; a row is an object {{…}}"
        )
    return row


def _csv(file: SourceFile, delimiter: str) -> Iterator[Row]:
    with _text(file, newline="") as stream, _large_fields():
        reader = csv.DictReader(stream, delimiter=delimiter)
        try:
            for row in reader:
                if None in row:
                    raise DataError(
                        f"{file.address}:{reader.line_num}: more values than the "
                        f"{len(reader.fieldnames or ())} columns of the first line"
                    )
                yield row
        except csv.Error as error:
            raise DataError(f"{file.address}:{reader.line_num}: {error}") from error


@contextlib.contextmanager
def _large_fields() -> Iterator[None]:
    """Allow fields above csv's limit of 128 KiB while a file is read: a document may be longer."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _txt(file: SourceFile, field: str, sample_by: str) -> Iterator[Row]:
    with _text(file) as stream:
        if sample_by == "document":
            yield {field: stream.read()}
        elif sample_by == "line":
            for line in stream:
                yield {field: line.rstrip("\r\n")}
        else:
            lines: list[str] = []
            for line in stream:
                if line.strip():
                    lines.append(line)
                elif lines:
                    yield {field: "".join(lines).rstrip("\r\n")}
                    lines = []
            if lines:
                yield {field: "".join(lines).rstrip("\r\n")}


def _parquet(file: SourceFile, columns: Sequence[str] | None) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with file.open(decompress=False) as stream:
        try:
            table = pq.ParquetFile(stream)
            for batch in table.iter_batches(
                _ARROW_ROWS, columns=_present(columns, table.schema_arrow.names)
            ):
                yield from batch.to_pylist()
        except pa.ArrowInvalid as error:
            raise DataError(f"{file.address}: not a parquet file: {error}") from error


def _arrow(file: SourceFile, columns: Sequence[str] | None) -> Iterator[Row]:
    import pyarrow as pa

    with file.open() as stream:
        try:
            for batch in _arrow_batches(stream):
                wanted = _present(columns, batch.schema.names)
                chosen = batch.select(wanted) if wanted else batch
                for start in range(0, chosen.num_rows, _ARROW_ROWS):
                    yield from chosen.slice(start, _ARROW_ROWS).to_pylist()
        except pa.ArrowInvalid as error:
            raise DataError(f"{file.address}: not an arrow file: {error}") from error


def _arrow_batches(stream: Any) -> Iterator[Any]:
    """Both layouts of arrow files: with a footer (random access), and the stream of `datasets`."""
    import pyarrow as pa

    try:
        reader = pa.ipc.open_file(stream)
    except pa.ArrowInvalid:
        stream.seek(0)
        yield from pa.ipc.open_stream(stream)
        return
    for index in range(reader.num_record_batches):
        yield reader.get_batch(index)


def _present(columns: Sequence[str] | None, names: Sequence[str]) -> list[str] | None:
    """The wanted columns; all where one is missing, so that the message can name what is there."""
    if columns is None or not set(columns) <= set(names):
        return None
    return list(columns)
