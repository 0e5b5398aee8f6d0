"""The formats of files: json and jsonl, csv and tsv, txt, parquet, arrow. Each yields rows."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

import fsspec
from fsspec.utils import infer_compression

from ed_data.errors import DataError
from ed_data.inform import COMPRESSIONS, Inform
from ed_data.schema import Row

if TYPE_CHECKING:
    import pyarrow as pa

#: (place, row), as `ed_data.sources.Source` yields them.
PlacedRows = Iterator[tuple[str, Row]]
_ARROW_ROWS = 1024  # rows converted to Python at a time


@dataclass(frozen=True)
class SourceFile:
    """One file.

    Attributes:
        fs: its file system.
        path: its path there.
        identity: changes when the file is rewritten.
        address: the path as messages show it; of a copy, that of the original.
    """

    fs: fsspec.AbstractFileSystem
    path: str
    identity: str
    address: str

    def open(self, *, decompress: bool = True) -> IO[bytes]:
        """Open for reading bytes; compression is told from the suffix."""
        compression = infer_compression(self.path) if decompress else None
        if decompress and compression is None and self.path.endswith(COMPRESSIONS):
            suffix = self.path.rpartition(".")[2]
            raise DataError(
                f"{self.address}: reading .{suffix} files needs a package that is not installed"
                + (" (zstandard)" if suffix == "zst" else "")
            )
        return fsspec.core.OpenFile(self.fs, self.path, "rb", compression=compression).open()


def read_file(inform: Inform, file: SourceFile, columns: Sequence[str] | None) -> PlacedRows:
    """Yield the rows of one file of an inform.

    Args:
        inform: its `kind` chooses the reader, `content_field` names a text of a txt file, and
            `sample_by` cuts such a file into rows.
        file: the file.
        columns: the fields that are needed, or None for all; a hint for columnar formats.

    Raises:
        DataError: the file is not of that kind.
    """
    try:
        yield from READERS[inform.kind](file, inform, columns)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file.address}: not UTF-8 text: {error}; convert the file, for example with iconv"
        ) from error
    except (OSError, EOFError) as error:
        raise DataError(f"{file.address}: cannot be read: {error}") from error


def _text(file: SourceFile, newline: str | None = None) -> io.TextIOWrapper:
    return io.TextIOWrapper(file.open(), encoding="utf-8-sig", newline=newline)


def _json(file: SourceFile, inform: Inform, columns: Sequence[str] | None) -> PlacedRows:
    with _text(file) as stream:
        number, line = 1, stream.readline()
        while line and not line.strip():
            number, line = number + 1, stream.readline()
        if line.lstrip().startswith("["):
            yield from _json_array(file, "\n" * (number - 1) + line + stream.read())
            return
        while line:
            if line.strip():
                yield f"{file.address}:{number}", _json_row(file, number, line)
            number, line = number + 1, stream.readline()


def _json_array(file: SourceFile, text: str) -> PlacedRows:
    try:
        items = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{file.address}:{error.lineno}: not JSON: {error.msg}") from error
    for index, item in enumerate(items):
        place = f"{file.address}, item {index}"
        if not isinstance(item, dict):
            raise DataError(f"{place} is a {type(item).__name__}; a row is an object {{…}}")
        yield place, item


def _json_row(file: SourceFile, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{file.address}:{number}: not JSON: {error.msg}; a json file holds one object a line, "
            "or one list of objects: correct or delete the line"
        ) from error
    if not isinstance(row, dict):
        raise DataError(
            f"{file.address}:{number}: a {type(row).__name__}; a row is an object {{…}}: correct "
            "or delete the line"
        )
    return row


def _csv(file: SourceFile, inform: Inform, columns: Sequence[str] | None) -> PlacedRows:
    delimiter = "," if inform.kind == "csv" else "\t"
    with _text(file, newline="") as stream, _large_fields():
        reader = csv.DictReader(stream, delimiter=delimiter, restval=_ABSENT)
        try:
            for row in reader:
                place = f"{file.address}:{reader.line_num}"
                short = next((name for name, value in row.items() if value is _ABSENT), None)
                if None in row or short is not None:
                    raise DataError(
                        f"{place}: {'more' if short is None else 'fewer'} values than the "
                        f"{len(reader.fieldnames or ())} columns of the first line"
                        + (f" ({short!r} has none)" if short is not None else "")
                        + f"; put a value that holds {delimiter!r} in quotes, or correct the line"
                    )
                yield place, row
        except csv.Error as error:
            raise DataError(f"{file.address}:{reader.line_num}: {error}") from error


_ABSENT = "".join(["absent"])  # told from a value of the file by identity


@contextlib.contextmanager
def _large_fields() -> Iterator[None]:
    """Allow fields above csv's limit of 128 KiB while a file is read: a document may be longer."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _txt(file: SourceFile, inform: Inform, columns: Sequence[str] | None) -> PlacedRows:
    field = inform.content_field
    with _text(file) as stream:
        if inform.sample_by == "document":
            yield file.address, {field: stream.read()}
            return
        first, lines = 1, list[str]()
        for number, line in enumerate(stream, 1):
            if inform.sample_by == "line":
                yield f"{file.address}:{number}", {field: line.rstrip("\r\n")}
            elif line.strip():
                first = first if lines else number
                lines.append(line)
            elif lines:
                yield f"{file.address}:{first}", {field: "".join(lines).rstrip("\r\n")}
                lines = []
        if lines:
            yield f"{file.address}:{first}", {field: "".join(lines).rstrip("\r\n")}


def _parquet(file: SourceFile, inform: Inform, columns: Sequence[str] | None) -> PlacedRows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with file.open(decompress=False) as stream:
        try:
            table = pq.ParquetFile(stream)
            names = _present(columns, table.schema_arrow.names)
            yield from _numbered(file, table.iter_batches(_ARROW_ROWS, columns=names))
        except pa.ArrowInvalid as error:
            raise DataError(f"{file.address}: not a parquet file: {error}") from error


def _arrow(file: SourceFile, inform: Inform, columns: Sequence[str] | None) -> PlacedRows:
    import pyarrow as pa

    with file.open() as stream:
        try:
            yield from _numbered(file, _arrow_batches(stream, columns))
        except pa.ArrowInvalid as error:
            raise DataError(f"{file.address}: not an arrow file: {error}") from error


def _arrow_batches(stream: IO[bytes], columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
    """Both layouts of arrow files: with a footer (random access), and the stream of `datasets`."""
    import pyarrow as pa

    try:
        reader = pa.ipc.open_file(stream)
        batches = map(reader.get_batch, range(reader.num_record_batches))
    except pa.ArrowInvalid:
        stream.seek(0)
        batches = iter(pa.ipc.open_stream(stream))
    for batch in batches:
        names = _present(columns, batch.schema.names)
        chosen = batch.select(names) if names else batch
        for start in range(0, chosen.num_rows, _ARROW_ROWS):
            yield chosen.slice(start, _ARROW_ROWS)


def _numbered(file: SourceFile, batches: Iterator[pa.RecordBatch]) -> PlacedRows:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            yield f"{file.address}, row {number}", row
            number += 1


def _present(columns: Sequence[str] | None, names: Sequence[str]) -> list[str] | None:
    """The wanted columns; all where one is missing, so that the message can name the others."""
    if columns is None or not set(columns) <= set(names):
        return None
    return list(columns)


Reader = Callable[[SourceFile, Inform, Sequence[str] | None], PlacedRows]
READERS: dict[str, Reader] = {
    "json": _json,
    "csv": _csv,
    "tsv": _csv,
    "txt": _txt,
    "parquet": _parquet,
    "arrow": _arrow,
}
