"""Limits of files that expand: compressed text, pages of parquet files, dictionaries of arrow.

A file of a few kilobytes can contain rows of many gigabytes. Reading is an error before the memory
is exhausted, and the error names the file.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import IO, TYPE_CHECKING

from ed_data.sources.parquet_footers import BYTE_ARRAY, ColumnChunk

if TYPE_CHECKING:
    import pyarrow as pa
    from _typeshed import WriteableBuffer

#: Bytes after decompression that every file may have, and the limit of larger files: the ratio to
#: the compressed bytes. Text rarely exceeds a ratio of 20.
FREE_BYTES, MAX_RATIO = 2**28, 200
#: Bytes of rows that are converted to Python at once, and of one row.
ROWS_BYTES, MAX_ROW_BYTES = 2**28, 2**30
#: Dictionaries of this many bytes are not copied into each row while a parquet file is read.
_LARGE_DICTIONARY = 2**23


class ExpansionError(Exception):
    """A file expands beyond a limit. The message does not name the file."""


class ExpandedStream(io.RawIOBase):
    """The bytes of a compressed file.

    Args:
        stream: the decompressed stream.
        compressed: the compressed file that `stream` reads.
    """

    def __init__(self, stream: IO[bytes], compressed: IO[bytes]) -> None:
        super().__init__()
        self._stream, self._compressed, self._count = stream, compressed, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._stream.seekable()

    def tell(self) -> int:
        return self._stream.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        place = self._stream.seek(offset, whence)
        self._check(place)
        return place

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer)
        data = self._stream.read(len(view))
        view[: len(data)] = data
        self._check(self._count + len(data))
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
            self._compressed.close()
        super().close()

    def _check(self, count: int) -> None:
        self._count = max(self._count, count)
        if self._count > FREE_BYTES and self._count > MAX_RATIO * self._compressed.tell():
            raise ExpansionError(
                f"{self._compressed.tell()} compressed bytes expand to {self._count} bytes or "
                f"more, and the limit is a ratio of {MAX_RATIO}: decompress the file yourself if "
                "you trust it"
            )


def check_column_chunks(chunks: Iterable[ColumnChunk]) -> list[str]:
    """Check the sizes of a parquet file before its pages are decompressed.

    Returns:
        The columns of texts whose dictionaries are large, for `ParquetFile(read_dictionary=...)`.

    Raises:
        ExpansionError: the pages of a column expand beyond the limit.
    """
    large: dict[str, None] = {}
    for chunk in chunks:
        size, stored = chunk.expanded_bytes, chunk.stored_bytes
        if size > FREE_BYTES and size > MAX_RATIO * stored:
            raise ExpansionError(
                f"{stored} compressed bytes of the column {chunk.path!r} expand to "
                f"{size} bytes, and the limit is a ratio of {MAX_RATIO}: write the file again "
                "without compression if you trust it"
            )
        if chunk.dictionary_page is not None and chunk.physical_type == BYTE_ARRAY:
            pages = stored - max((chunk.data_page or 0) - chunk.dictionary_page, 0)
            if size - pages > _LARGE_DICTIONARY:
                large[chunk.path] = None
    return [*large]


def split_rows(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a batch in parts whose values in Python have at most `ROWS_BYTES`, or in
    parts of one row.

    Raises:
        ExpansionError: one row has more than `MAX_ROW_BYTES`.
    """
    if not any(_expands(field.type) for field in batch.schema):
        yield batch
        return
    start = 0
    while start < batch.num_rows:
        count = batch.num_rows - start
        while (size := _expanded_size(batch.slice(start, count))) > ROWS_BYTES and count > 1:
            count = max(count // 4, 1)
        if size > MAX_ROW_BYTES:
            raise ExpansionError(
                f"a row has {size} bytes, because it repeats entries of a dictionary, and the "
                f"limit is {MAX_ROW_BYTES} bytes: write the file again without dictionaries"
            )
        yield batch.slice(start, count)
        start += count


def _expands(kind: pa.DataType) -> bool:
    """Return whether values of a type refer to shared values."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return True
    return any(_expands(kind.field(place).type) for place in range(kind.num_fields))


def _expanded_size(values: pa.RecordBatch | pa.Array) -> int:
    """Return a limit of the bytes of values in Python."""
    import pyarrow as pa

    if isinstance(values, pa.RecordBatch):
        return sum(map(_expanded_size, values.columns))
    kind = values.type
    if not _expands(kind):
        return values.nbytes
    if pa.types.is_dictionary(kind):
        return len(values) * _largest(values.dictionary)
    if pa.types.is_run_end_encoded(kind):
        return len(values) * _largest(values.values)
    if pa.types.is_struct(kind):
        return sum(map(_expanded_size, values.flatten()))
    if isinstance(values, pa.ExtensionArray):
        return _expanded_size(values.storage)
    return _expanded_size(values.flatten())


def _largest(values: pa.Array) -> int:
    """Return a limit of the bytes of one value."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = values.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_large_string(kind):
        lengths = pc.call_function("binary_length", [values])
        return int(pc.call_function("max", [lengths]).as_py() or 0) + 1
    return _expanded_size(values) + 1
