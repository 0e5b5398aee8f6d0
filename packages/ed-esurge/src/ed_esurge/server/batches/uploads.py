"""Uploads as multipart/form-data, which are parsed and written to disk while they arrive."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import IO

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from ed_esurge.config import ServerLimits
from ed_esurge.server.http.body import aside, chunks
from ed_esurge.server.http.errors import APIError

# A form of /v1/files has two parts. The header of a part has at most 8 KiB.
MAX_PARTS, MAX_HEADERS, MAX_HEADER = 16, 8, 1000
# Maximum size of a part other than the file, and size of the pieces for the parser, in bytes.
MAX_FIELD, PIECE = 1024, 2**18


class Upload:
    """The parts of a form. Not thread-safe.

    Args:
        content_type: content type of the request, with the boundary.
        file: receives the content of the part `file`.

    Attributes:
        filename: name of the part `file`; None before that part.
        fields: the other parts as text.

    Raises:
        APIError: 400, the boundary is missing or too long.
    """

    def __init__(self, content_type: str, file: IO[bytes]) -> None:
        self.filename: str | None = None
        self.fields: dict[str, str] = {}
        self._file, self._count, self._ended = file, 0, False
        self._name, self._value = "", bytearray()
        self._header, self._text, self._disposition = bytearray(), bytearray(), b""
        _, options = parse_options_header(content_type)
        try:
            self._parser = MultipartParser(
                options.get(b"boundary", b""),
                {
                    "on_part_begin": self._begin,
                    "on_part_data": self._data,
                    "on_part_end": self._part_end,
                    "on_header_field": lambda data, start, end: self._header.extend(
                        data[start:end]
                    ),
                    "on_header_value": lambda data, start, end: self._text.extend(data[start:end]),
                    "on_header_end": self._header_end,
                    "on_headers_finished": self._headers_finished,
                    "on_end": self._end,
                },
                max_header_count=MAX_HEADERS,
                max_header_size=MAX_HEADER,
            )
        except FormParserError as error:
            raise _invalid(str(error)) from None
        if not options.get(b"boundary"):
            raise _invalid("the Content-Type has no boundary")

    def feed(self, data: bytes) -> None:
        """Parse the next bytes of the body.

        Raises:
            APIError: 400, the bytes are not a form, or a part exceeds its limit.
        """
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _invalid(str(error)) from None

    def close(self) -> None:
        """End the body. Raises APIError: 400, the form is incomplete."""
        if not self._ended:
            raise _invalid("the last boundary is missing")
        if self.filename is None or "purpose" not in self.fields:
            raise APIError("the form requires the fields purpose and file", param="file")

    def _begin(self) -> None:
        self._count += 1
        if self._count > MAX_PARTS:
            raise _invalid(f"a form has at most {MAX_PARTS} parts")
        self._name, self._value, self._disposition = "", bytearray(), b""

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._text)
        self._header, self._text = bytearray(), bytearray()

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name == "file":
            if self.filename is not None:
                raise _invalid("a form must have one part `file`")
            self.filename = options.get(b"filename", b"file").decode("utf-8", "replace")[:256]

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self._file.write(memoryview(data)[start:end])
            return
        if len(self._value) + end - start > MAX_FIELD:
            raise _invalid(f"a part other than `file` has at most {MAX_FIELD} bytes")
        self._value += data[start:end]

    def _part_end(self) -> None:
        if self._name != "file":
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._ended = True


async def receive(request: Request, limits: ServerLimits, path: Path) -> Upload:
    """Write the file of a form to a path, and return the form.

    Raises:
        APIError: 400, the form is invalid; 408, the body is too slow; 413, too long; 503, the
            server has too many bodies in memory.
        OSError: the file cannot be written.
    """
    pending = bytearray()
    with path.open("wb") as file:
        upload = Upload(request.headers.get("content-type", ""), file)

        async for chunk in chunks(request, limits.max_file_bytes, limits.body_timeout):
            pending += chunk
            if len(pending) >= PIECE:
                data, pending = bytes(pending), bytearray()
                await aside(partial(upload.feed, data), len(data))
        await aside(partial(upload.feed, bytes(pending)), len(pending))
    upload.close()
    return upload


def _invalid(reason: str) -> APIError:
    return APIError(f"the body is not a valid form (multipart/form-data): {reason}", param="file")
