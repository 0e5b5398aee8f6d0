"""Lines of a file as text, with their positions, so that reading can resume at any line."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import IO, NamedTuple, cast

from ed_data.errors import DataError
from ed_data.schema import Row


class Spot(NamedTuple):
    """A position between two rows of a file, at which reading can resume.

    Attributes:
        row: number of lines (in a table: of rows) before the position.
        offset: number of decompressed bytes before the position; 0 in files that are not read by
            lines.
        part: number of documents of the row before the position, if a row becomes several
            documents. Sources ignore the number.
    """

    row: int = 0
    offset: int = 0
    part: int = 0


START = Spot()

#: Maximum size after decompression of a line, and of a file that is one document. A compressed file
#: of a few megabytes can expand to a line that exceeds the memory.
MAX_LINE, MAX_REST = 2**30, 2**33


class LineRecord(NamedTuple):
    """A row and its position.

    Attributes:
        place: file and line (or row), for messages.
        row: the fields, or the error of an invalid row, which the reader may skip.
        at: position of the row.
        next_spot: position of the next row.
    """

    place: str
    row: Row | DataError
    at: Spot
    next_spot: Spot


_MARK = b"\xef\xbb\xbf"


class Lines(Iterator[str]):
    """UTF-8 lines from a position on, without a byte-order mark.

    A line that is not valid text raises a `DataError`, and reading can continue after it.

    Attributes:
        spot: position of the next line.
    """

    def __init__(self, stream: IO[bytes], address: str, start: Spot = START) -> None:
        self._address = address
        self._stream = _skip_bytes(stream, start.offset)
        self.spot = start

    def __next__(self) -> str:
        raw = self._stream.readline(MAX_LINE)
        if not raw:
            raise StopIteration
        row, offset, _ = self.spot
        self.spot = Spot(row + 1, offset + len(raw))
        if len(raw) == MAX_LINE and not raw.endswith(b"\n"):
            self._skip_line()
            raise DataError(
                f"{self._address}:{row + 1}: the line has {MAX_LINE} bytes or more after "
                "decompression; split the line, or delete it"
            )
        if offset == 0 and raw.startswith(_MARK):
            raw = raw[len(_MARK) :]
        return decode_text(raw, f"{self._address}:{row + 1}")

    def rest(self) -> bytes:
        """Return the bytes that have not been read."""
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


def decode_text(raw: bytes, place: str) -> str:
    """Decode UTF-8 bytes.

    Raises:
        DataError: the bytes are not UTF-8, or contain a NUL.
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
            f"{place}: a NUL byte, so the file is not a text file, or is UTF-16 (convert it with "
            "iconv); correct or delete the line"
        )
    return text


def _skip_bytes(stream: IO[bytes], offset: int) -> IO[bytes]:
    """Return the stream after its first bytes, with a fast `readline`."""
    if offset:
        try:
            stream.seek(offset)
        except (OSError, ValueError, NotImplementedError):  # the stream cannot seek
            while offset > 0 and (passed := len(stream.read(min(offset, 1 << 20)))):
                offset -= passed
    if hasattr(stream, "readinto") and not isinstance(stream, io.BufferedReader):
        return io.BufferedReader(cast(io.RawIOBase, stream), 1 << 17)
    return stream
