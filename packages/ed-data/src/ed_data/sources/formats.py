"""Readers of file formats, which yield records: json, jsonl, csv, tsv, txt, parquet, arrow."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import lzma
import math
import struct
import sys
import threading
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, cast

import fsspec
from fsspec.utils import infer_compression

from ed_data.config.source import COMPRESSIONS, Inform
from ed_data.errors import DataError
from ed_data.schema import OPTIONAL_FIELDS, Cell, Row
from ed_data.sources.expansion import (
    ExpandedStream,
    ExpansionError,
    check_column_chunks,
    split_rows,
)
from ed_data.sources.features import read_features, row_decoder
from ed_data.sources.lines import START, LineRecord, Lines, Spot, decode_text
from ed_data.sources.parquet_footers import read_column_chunks

if TYPE_CHECKING:
    import pyarrow as pa

RowReader = Iterator[LineRecord]
_DECOMPRESSORS = cast("dict[str, Callable[..., IO[bytes]]]", fsspec.compression.compr)
_ARROW_ROWS = 1024  # rows converted to Python at a time


@dataclass(frozen=True)
class SourceFile:
    """One file.

    Attributes:
        fs: file system of the file.
        path: path in the file system.
        identity: a value that changes when the file is rewritten.
        address: path in messages; for a copy, the path of the original.
        size: size in bytes, 0 if unknown.
        folder: the folder that `data_files` names; None if `data_files` names the file.
    """

    fs: fsspec.AbstractFileSystem
    path: str
    identity: str
    address: str
    size: int = 0
    folder: str | None = None

    def open(self, *, decompress: bool = True) -> IO[bytes]:
        """Open the file for reading bytes; the suffix determines the compression."""
        compression = infer_compression(self.path) if decompress else None
        if decompress and compression is None and self.path.endswith(COMPRESSIONS):
            suffix = self.path.rpartition(".")[2]
            raise DataError(
                f"{self.address}: reading .{suffix} files requires a package that is not installed"
                + (" (zstandard)" if suffix == "zst" else "")
            )
        if compression is None:
            return fsspec.core.OpenFile(self.fs, self.path, "rb").open()
        compressed = cast("IO[bytes]", self.fs.open(self.path, "rb"))
        try:
            stream = _DECOMPRESSORS[compression](compressed, mode="r")
        except (ArithmeticError, LookupError, RuntimeError, ValueError, struct.error) as error:
            # No member, an encrypted one, another method, or damaged names and positions.
            compressed.close()
            raise OSError(f"the archive has no file that can be read: {error}") from error
        except BaseException:
            compressed.close()
            raise
        return io.BufferedReader(ExpandedStream(stream, compressed), 1 << 17)


def open_rows(
    inform: Inform, file: SourceFile, columns: Sequence[str] | None, start: Spot = START
) -> RowReader:
    """Yield the records of one file of an inform.

    Args:
        inform: `kind` selects the reader, `content_field` names the text of a txt file, and
            `sample_by` divides such a file into rows.
        file: the file.
        columns: the required fields, or None for all; a hint for columnar formats.
        start: first position to read: `at` or `after` of an earlier record.

    Raises:
        DataError: the file does not have this format, or is truncated.
    """
    try:
        yield from READERS[inform.kind](file, inform, columns, start)
    except ExpansionError as error:
        raise DataError(f"{file.address}: {error}") from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{file.address} cannot be read: {error}; if the file is truncated or damaged, "
            "download it again"
        ) from error


def _json(
    file: SourceFile, inform: Inform, columns: Sequence[str] | None, start: Spot
) -> RowReader:
    with file.open() as stream:
        # The rows of a list have no offset.
        lines = Lines(stream, file.address, start if start.offset else START)
        begins = start.offset == 0
        while True:
            at = lines.spot
            place = f"{file.address}:{at.row + 1}"
            try:
                line = next(lines, None)
                if line is None:
                    return
                if not line.strip():
                    continue
                if begins and line.lstrip().startswith("["):
                    text = "\n" * at.row + line + decode_text(lines.rest(), file.address)
                    yield from _json_list(file, text, start.row)
                    return
                row: Row | DataError = _json_row(place, line)
            except DataError as error:
                row = error
            begins = False
            yield LineRecord(place, row, at, lines.spot)


def _json_list(file: SourceFile, text: str, first: int) -> RowReader:
    try:
        items = _JSON.decode(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{file.address}:{error.lineno}: not JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file.address}: not JSON: {error}") from error
    for index in range(first, len(items)):
        place, item = f"{file.address}, item {index}", items[index]
        if not isinstance(item, dict):
            item = DataError(f"{place} is a {type(item).__name__}; a row must be an object {{…}}")
        yield LineRecord(place, item, Spot(index), Spot(index + 1))


def _json_row(place: str, line: str) -> Row:
    try:
        row = _JSON.decode(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise DataError(
            f"{place}: not JSON: {reason}; a json file contains one object per line, or one list "
            "of objects: correct or delete the line"
        ) from error
    if not isinstance(row, dict):
        raise DataError(
            f"{place}: the line is a {type(row).__name__}; a row must be an object {{…}}: correct "
            "or delete the line"
        )
    return row


def _fields(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, _ in pairs if counts[name] > 1)
        raise ValueError(f"the field {twice!r} occurs twice")
    return row


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a JSON value (write null)")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {digits} is too large")
    return value


_JSON = json.JSONDecoder(object_pairs_hook=_fields, parse_constant=_no_number, parse_float=_finite)


def _csv(file: SourceFile, inform: Inform, columns: Sequence[str] | None, start: Spot) -> RowReader:
    delimiter = "," if inform.kind == "csv" else "\t"
    with _large_fields(), file.open() as stream, contextlib.ExitStack() as opened:
        lines = Lines(stream, file.address)
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        names = _header(reader, file)
        if names is None:
            return
        if start.offset:
            lines = Lines(opened.enter_context(file.open()), file.address, start)
            reader = csv.reader(lines, delimiter=delimiter, strict=True)
        while True:
            at = lines.spot
            place = f"{file.address}:{at.row + 1}"
            try:
                values = next(reader, None)
                if values is None:
                    return
                if not values:
                    continue
                row: Row | DataError = dict(zip(names, map(Cell, values), strict=False))
                if len(values) != len(names):
                    row = _misfit(place, names, values, delimiter)
            except csv.Error as error:
                row = DataError(
                    f"{place}: {error} (the row begins here, and was read up to line "
                    f"{lines.spot.row}); close its quotes, and double each quote inside a value"
                )
            except DataError as error:
                row = error
            yield LineRecord(place, row, at, lines.spot)


def _header(reader: Iterator[list[str]], file: SourceFile) -> list[str] | None:
    """Return the names of the columns, or None for an empty file."""
    try:
        names = next((values for values in reader if values), None)
    except csv.Error as error:
        raise DataError(f"{file.address}:1: the names of the columns: {error}") from error
    counts = Counter(names or ())
    twice = next((name for name in names or () if counts[name] > 1), None)
    if twice is not None:
        raise DataError(f"{file.address}:1: two columns have the name {twice!r}: rename one")
    return names


def _misfit(place: str, names: list[str], values: list[str], delimiter: str) -> DataError:
    short = len(values) < len(names)
    return DataError(
        f"{place}: {'fewer' if short else 'more'} values than the {len(names)} columns of the "
        "first line"
        + (f" ({names[len(values)]!r} has none)" if short else "")
        + f"; put values that contain {delimiter!r} in quotes, or correct the line"
    )


_LIMIT = threading.Lock()
_limits: list[int] = []


@contextlib.contextmanager
def _large_fields() -> Iterator[None]:
    """Allow fields longer than csv's limit of 128 KiB, because a document may be longer.

    The limit is global: the last of several readers restores the value before the first reader.
    """
    with _LIMIT:
        old_limit = csv.field_size_limit(sys.maxsize)
        _limits.append(old_limit)
    try:
        yield
    finally:
        with _LIMIT:
            first = _limits[0]
            _limits.pop()
            if not _limits:
                csv.field_size_limit(first)


def _txt(file: SourceFile, inform: Inform, columns: Sequence[str] | None, start: Spot) -> RowReader:
    field = inform.content_field
    with file.open() as stream:
        lines = Lines(stream, file.address, start)
        if inform.sample_by == "document":
            if start == START:
                text = decode_text(lines.rest(), file.address).removeprefix("\ufeff")
                text = text.replace("\r\n", "\n").replace("\r", "\n")
                yield LineRecord(file.address, {field: text}, START, Spot(1, 1))
            return
        is_single_line = inform.sample_by == "line"
        at, row_lines, wrong = lines.spot, list[str](), None
        while True:
            begin = lines.spot
            try:
                line = next(lines, None)
            except DataError as error:
                line, wrong = "wrong", wrong or error
            ends = is_single_line or not (line or "").strip()
            if line is not None and (is_single_line or not ends):
                at = at if row_lines else begin
                row_lines.append(line)
            if row_lines and ends:
                row = wrong or {field: "".join(row_lines).rstrip("\r\n")}
                yield LineRecord(f"{file.address}:{at.row + 1}", row, at, lines.spot)
                row_lines, wrong = [], None
            if line is None:
                return


def _parquet(
    file: SourceFile, inform: Inform, columns: Sequence[str] | None, start: Spot
) -> RowReader:
    import pyarrow.parquet as pq

    with file.open(decompress=False) as stream, _damage_named(file, "a parquet file"):
        table = pq.ParquetFile(stream)
        if large := check_column_chunks(read_column_chunks(stream)):
            table = pq.ParquetFile(stream, read_dictionary=large)
        decode = row_decoder(read_features(table.schema_arrow.metadata))
        sizes = [table.metadata.row_group(i).num_rows for i in range(table.metadata.num_row_groups)]
        first, first_row = 0, 0
        while first < len(sizes) and first_row + sizes[first] <= start.row:
            first_row += sizes[first]
            first += 1
        groups = range(first, len(sizes))
        names = choose_columns(columns, table.schema_arrow.names)
        batches = table.iter_batches(_ARROW_ROWS, row_groups=groups, columns=names)
        yield from _iterate_rows(file, batches, first_row, start.row, decode)


def _arrow(
    file: SourceFile, inform: Inform, columns: Sequence[str] | None, start: Spot
) -> RowReader:
    with file.open() as stream, _damage_named(file, "an arrow file"):
        batches, metadata = _arrow_batches(stream, columns)
        decode = row_decoder(read_features(metadata))
        yield from _iterate_rows(file, batches, 0, start.row, decode)


@contextlib.contextmanager
def _damage_named(file: SourceFile, kind: str) -> Iterator[None]:
    """Raise the errors of pyarrow about a damaged file as errors with the name of the file.

    Names and values that are not UTF-8, and times beyond the calendar, raise errors of Python.
    """
    import pyarrow as pa

    try:
        yield
    except (DataError, ExpansionError, OSError):
        raise
    except (pa.ArrowException, ArithmeticError, LookupError, ValueError) as error:
        raise DataError(f"{file.address} is not {kind}, or is truncated: {error}") from error
    except MemoryError as error:  # the file states a length beyond the memory
        raise DataError(f"{file.address} is not {kind}, or needs more memory") from error


def _arrow_batches(
    stream: IO[bytes], columns: Sequence[str] | None
) -> tuple[Iterator[pa.RecordBatch], dict[bytes, bytes] | None]:
    """Return the batches of both layouts of arrow files, and the metadata of the schema.

    The layouts are a file with a footer, and the stream of `datasets`.
    """
    import pyarrow as pa

    try:
        reader = pa.ipc.open_file(stream)
        batches = map(reader.get_batch, range(reader.num_record_batches))
    except pa.ArrowInvalid:
        stream.seek(0)
        reader = pa.ipc.open_stream(stream)
        batches = iter(reader)

    def select() -> Iterator[pa.RecordBatch]:
        for batch in batches:
            names = choose_columns(columns, batch.schema.names)
            selected_batch = batch.select(names) if names else batch
            # Without a check, a damaged offset reads memory outside of the file.
            selected_batch.validate(full=True)
            for start in range(0, selected_batch.num_rows, _ARROW_ROWS):
                yield selected_batch.slice(start, _ARROW_ROWS)

    return select(), reader.schema.metadata


def _iterate_rows(
    file: SourceFile,
    batches: Iterator[pa.RecordBatch],
    number: int,
    start: int,
    decode: Callable[[Row], Row],
) -> RowReader:
    """Yield the rows of tables from `start` on.

    Args:
        number: the number of the first row of the tables.
        start: the number of the first row to yield.
        decode: decodes the columns that `datasets` stores as JSON text.
    """
    for batch in batches:
        if number + batch.num_rows <= start:
            number += batch.num_rows
            continue
        rows = split_rows(batch.slice(max(start - number, 0)))
        for row in (row for part in rows for row in part.to_pylist()):
            at = max(start, number)
            place = f"{file.address}, row {at}"
            try:
                decoded_row: Row | DataError = decode(row)
            except ValueError as error:
                decoded_row = DataError(f"{place}: a column of the type Json is not JSON: {error}")
            yield LineRecord(place, decoded_row, Spot(at), Spot(at + 1))
            number = at + 1


def choose_columns(columns: Sequence[str] | None, names: Sequence[str]) -> list[str] | None:
    """Return the columns of a table to read, or None for all of them.

    `OPTIONAL_FIELDS` may be missing. If another column is missing, all columns are read, so that
    the error message can list their names.

    Args:
        columns: the requested columns, or None for all.
        names: the columns of the table.
    """
    if columns is None or not {*columns} - {*OPTIONAL_FIELDS} <= {*names}:
        return None
    return [name for name in columns if name in names]


FormatReader = Callable[[SourceFile, Inform, Sequence[str] | None, Spot], RowReader]
READERS: dict[str, FormatReader] = {
    "json": _json,
    "csv": _csv,
    "tsv": _csv,
    "txt": _txt,
    "parquet": _parquet,
    "arrow": _arrow,
}
