"""The columns of a parquet file, read from its footer.

pyarrow ends the process if it is asked for the columns of some damaged footers: the C++ library
raises an error that `RowGroupMetaData.column` does not catch. So this module reads the footer. It
is a structure of Thrift's compact protocol.

Source: the Thrift compact protocol, and `parquet.thrift` of Apache Parquet for numbers of fields.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import IO, NamedTuple

#: The last bytes of a file: the length of the footer and four letters.
_TAIL_BYTES = 8
#: Structures within structures. Footers of Parquet have at most eight.
_MAX_DEPTH = 32
# Types of values in the compact protocol.
_TRUE, _FALSE, _BYTE, _INT64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, *range(6, 13)
_INTEGERS = range(_BYTE + 1, _INT64 + 1)
# Numbers of fields: of the footer, a row group, a column chunk, and of its values.
_ROW_GROUPS, _COLUMNS, _META_DATA = 4, 1, 3
_TYPE, _PATH, _EXPANDED, _STORED, _DATA_PAGE, _DICTIONARY_PAGE = 1, 3, 6, 7, 9, 11
#: The physical type of texts and bytes of any length.
BYTE_ARRAY = 6


class ColumnChunk(NamedTuple):
    """The values of one column in one group of rows.

    `data_page` and `dictionary_page` are places in the file, or None if there is no such page.
    """

    path: str
    physical_type: int
    expanded_bytes: int
    stored_bytes: int
    data_page: int | None
    dictionary_page: int | None


def read_column_chunks(stream: IO[bytes]) -> list[ColumnChunk]:
    """Return the column chunks of all groups of rows, in the order of the file.

    Raises:
        ValueError: the footer is damaged.
    """
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(size - _TAIL_BYTES, 0))
    tail = stream.read(_TAIL_BYTES)
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != b"PAR1" or length > size - _TAIL_BYTES:
        raise ValueError("the file does not end with a footer of parquet")
    stream.seek(size - _TAIL_BYTES - length)
    footer = _FooterReader(stream.read(length)).read_struct({}, _MAX_DEPTH)
    return [*_iterate_chunks(footer)]


def _iterate_chunks(footer: dict[int, object]) -> Iterator[ColumnChunk]:
    for group in _get_structs(footer, _ROW_GROUPS):
        for column in _get_structs(group, _COLUMNS):
            values = column.get(_META_DATA)
            if not isinstance(values, dict):
                raise ValueError("a column of the footer has no sizes")
            parts = values.get(_PATH)
            names = parts if isinstance(parts, list) else []
            kind, expanded, stored, data_page, dictionary_page = (
                number if isinstance(number := values.get(field), int) else None
                for field in (_TYPE, _EXPANDED, _STORED, _DATA_PAGE, _DICTIONARY_PAGE)
            )
            if kind is None or expanded is None or stored is None:
                raise ValueError("a column of the footer has no type or no size")
            path = ".".join(name.decode() for name in names if isinstance(name, bytes))
            yield ColumnChunk(path, kind, expanded, stored, data_page, dictionary_page)


def _get_structs(values: dict[int, object], field: int) -> list[dict[int, object]]:
    items = values.get(field)
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ValueError(f"field {field} of the footer is not a list of structures")
    return items


class _FooterReader:
    """A cursor over a footer. A structure becomes a mapping from numbers of fields to values."""

    def __init__(self, data: bytes) -> None:
        self._data, self._place = data, 0

    def read_struct(self, values: dict[int, object], depth: int) -> dict[int, object]:
        """Read a structure into `values`, as pyarrow does: a repeated field replaces the first."""
        if depth == 0:
            raise ValueError(f"the footer has more than {_MAX_DEPTH} levels")
        field = 0
        while header := self._read_byte():
            kind = header & 15
            field = field + (header >> 4) if header >> 4 else self._read_integer()
            if kind in (_TRUE, _FALSE):
                values[field] = kind == _TRUE
            elif kind == _STRUCT:
                earlier = values.get(field)
                struct = earlier if isinstance(earlier, dict) else {}
                values[field] = self.read_struct(struct, depth - 1)
            else:
                values[field] = self._read_value(kind, depth)
        return values

    def _read_value(self, kind: int, depth: int) -> object:
        if kind in (_TRUE, _FALSE, _BYTE):
            return self._read_byte()
        if kind in _INTEGERS:
            return self._read_integer()
        if kind == _DOUBLE:
            return self._read_bytes(8)
        if kind == _BINARY:
            return self._read_bytes(self._read_varint())
        if kind in (_LIST, _SET):
            return self._read_list(depth)
        if kind == _MAP:
            return self._read_map(depth)
        if kind == _STRUCT:
            return self.read_struct({}, depth - 1)
        raise ValueError(f"the footer has a value of the unknown type {kind}")

    def _read_list(self, depth: int) -> list[object]:
        header = self._read_byte()
        count, kind = header >> 4, header & 15
        return self._read_items(self._read_varint() if count == 15 else count, (kind,), depth)

    def _read_map(self, depth: int) -> list[object]:
        count = self._read_varint()
        kinds = divmod(self._read_byte(), 16) if count else ()
        return self._read_items(count, kinds, depth)

    def _read_items(self, count: int, kinds: tuple[int, ...], depth: int) -> list[object]:
        if depth == 0:
            raise ValueError(f"the footer has more than {_MAX_DEPTH} levels")
        if count * len(kinds) > len(self._data) - self._place:
            raise ValueError(f"the footer has a list of {count} values that do not fit")
        return [self._read_value(kind, depth - 1) for _ in range(count) for kind in kinds]

    def _read_integer(self) -> int:
        number = self._read_varint()
        return (number >> 1) ^ -(number & 1)

    def _read_varint(self) -> int:
        number = 0
        for shift in range(0, 70, 7):
            byte = self._read_byte()
            number |= (byte & 127) << shift
            if byte < 128:
                return number
        raise ValueError("the footer has a number of more than ten bytes")

    def _read_byte(self) -> int:
        if self._place >= len(self._data):
            raise ValueError("the footer ends too early")
        self._place += 1
        return self._data[self._place - 1]

    def _read_bytes(self, count: int) -> bytes:
        if count > len(self._data) - self._place:
            raise ValueError("the footer ends too early")
        self._place += count
        return self._data[self._place - count : self._place]
