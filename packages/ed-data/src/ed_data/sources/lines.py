"""The lines of a file as text, with the place of each, so that reading can go on at any of them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import IO, NamedTuple

from ed_data.errors import DataError
from ed_data.schema import Row


class Spot(NamedTuple):
    """A place between two rows of a file, where reading can go on.

    Attributes:
        row: lines (in a file of tables: rows) before it.
        offset: bytes before it, after decompression; 0 in a file that is not read by lines.
    """

    row: int = 0
    offset: int = 0


START = Spot()

#: Bytes after decompression of a line, and of a file that is one document. A compressed file of
#: some megabytes can expand to a line that exceeds the memory.
MAX_LINE, MAX_REST = 2**30, 2**33


class Record(NamedTuple):
    """A row and where it stands.

    Attributes:
        place: file and line (or row), for messages.
        row: the fields; the error of a row that cannot be read, which whoever reads may skip.
        at: where it begins.
        after: where the next one begins.
    """

    place: str
    row: Row | DataError
    at: Spot
    after: Spot


_MARK = b"\xef\xbb\xbf"


class Lines(Iterator[str]):
    """Lines of UTF-8, from a spot on; a byte-order mark at the beginning is left out.

    A line that is no text raises a `DataError`, and reading can go on after it.

    Attributes:
        spot: where the next line begins.
    """

    def __init__(self, stream: IO[bytes], address: str, start: Spot = START) -> None:
        self._address = address
        self._stream = _skipped(stream, start.offset)
        self.spot = start

    def __next__(self) -> str:
        raw = self._stream.readline(MAX_LINE)
        if not raw:
            raise StopIteration
        row, offset = self.spot
        self.spot = Spot(row + 1, offset + len(raw))
        if len(raw) == MAX_LINE and not raw.endswith(b"\n"):
            self._skip_line()
            raise DataError(
                f"{self._address}:{row + 1}: the line has {MAX_LINE} bytes or more after "
                "decompression; split the line, or delete it"
            )
        if offset == 0 and raw.startswith(_MARK):
            raw = raw[len(_MARK) :]
        return decoded(raw, f"{self._address}:{row + 1}")

    def rest(self) -> bytes:
        """Everything that has not been read."""
        raw = self._stream.read(MAX_REST)
        if len(raw) == MAX_REST:
            raise DataError(
                f"{self._address}: the file has {MAX_REST} bytes or more after decompression, "
                "too many to be read as one document; convert the file to JSON Lines"
            )
        return raw

    def _skip_line(self) -> None:
        """Move to the end of a line that is too long."""
        while piece := self._stream.readline(1 << 20):
            self.spot = self.spot._replace(offset=self.spot.offset + len(piece))
            if piece.endswith(b"\n"):
                return


def decoded(raw: bytes, place: str) -> str:
    """Bytes as text.

    Raises:
        DataError: they are not UTF-8, or hold a NUL.
    """
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: not UTF-8 text: {error}; convert the file, for example with iconv, or set "
            "on_error: skip"
        ) from error
    if "\0" in text:
        raise DataError(
            f"{place}: a NUL byte, so this is no text file (or one in UTF-16: convert it with "
            "iconv); correct or delete the line"
        )
    return text


def _skipped(stream: IO[bytes], offset: int) -> IO[bytes]:
    """The stream behind its first bytes, with a fast `readline`."""
    if offset:
        try:
            stream.seek(offset)
        except (OSError, ValueError, NotImplementedError):  # it can only be read from the front
            while offset > 0 and (passed := len(stream.read(min(offset, 1 << 20)))):
                offset -= passed
    if hasattr(stream, "readinto") and not isinstance(stream, io.BufferedReader):
        return io.BufferedReader(stream, 1 << 17)  # type: ignore[arg-type, return-value]
    return stream
