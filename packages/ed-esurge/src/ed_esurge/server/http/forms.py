"""Bodies of the type multipart/form-data, which are parsed while they arrive."""

from __future__ import annotations

import io
import re
from functools import partial
from typing import IO, Any, TypeVar

from ed_infra.options import Options
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from ed_esurge.config import ServerLimits
from ed_esurge.server.http.body import BODY_BYTES, aside, read_chunks
from ed_esurge.server.http.errors import APIError
from ed_esurge.server.http.fields import IgnoredKeys, validate_body

_OptionsT = TypeVar("_OptionsT", bound=Options)

# Limits of a form. The header of a part has at most 8 KiB.
MAX_PARTS, MAX_HEADERS, MAX_HEADER = 64, 8, 1000
# Maximum size of a part other than the file by default, and of the pieces for the parser, in bytes.
MAX_FIELD, PIECE = 1024, 2**18
#: Maximum size of a text of a form with an audio file, in bytes.
MAX_TEXT = 2**14
_ENTRY = re.compile(r"(\w+)\[(\w+)\]", re.ASCII)
#: Bytes of a body in addition to those of its file.
OVERHEAD = 2**17


def is_form(request: Request) -> bool:
    """Return whether the body of a request is a form."""
    kind = request.headers.get("content-type", "")
    return kind.partition(";")[0].strip().lower() == "multipart/form-data"


class Form:
    """The parts of a form. Not thread-safe.

    Args:
        content_type: content type of the request, with the boundary.
        file: receives the content of the part `file`.
        max_field: maximum size of another part, in bytes.

    Attributes:
        filename: name of the part `file`; None before that part.
        fields: name of each other part -> its texts.

    Raises:
        APIError: 400, the boundary is missing or too long.
    """

    def __init__(self, content_type: str, file: IO[bytes], max_field: int = MAX_FIELD) -> None:
        self.filename: str | None = None
        self.fields: dict[str, list[str]] = {}
        self._file, self._count, self._ended = file, 0, False
        self._most = max_field
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
        if len(self._value) + end - start > self._most:
            raise _invalid(f"a part other than `file` has at most {self._most} bytes")
        self._value += data[start:end]

    def _part_end(self) -> None:
        if self._name != "file":
            text = self._value.decode("utf-8", "replace")
            self.fields.setdefault(self._name, []).append(text)

    def _end(self) -> None:
        self._ended = True


async def read_form(
    request: Request, file: IO[bytes], most: int, seconds: float, max_field: int = MAX_FIELD
) -> Form:
    """Read a form, and write its part `file` to a file.

    Args:
        most: maximum size of the body, in bytes.
        seconds: time limit of the body.
        max_field: maximum size of a part other than the file, in bytes.

    Raises:
        APIError: 400, the form is invalid; 408, the body is too slow; 413, too long; 503, the
            server has too many bodies in memory.
        OSError: the file cannot be written.
    """
    form = Form(request.headers.get("content-type", ""), file, max_field)
    pending = bytearray()
    async for chunk in read_chunks(request, most, seconds):
        pending += chunk
        if len(pending) >= PIECE:
            data, pending = bytes(pending), bytearray()
            await aside(partial(form.feed, data), len(data))
    await aside(partial(form.feed, bytes(pending)), len(pending))
    form.close()
    return form


async def read_audio(
    request: Request,
    kind: type[_OptionsT],
    limits: ServerLimits,
    ignored: IgnoredKeys | None = None,
) -> _OptionsT:
    """Return a form with an audio file as a request model.

    See `ed_esurge.server.http.body.read_body`. A field whose name ends with `[]` is a list.

    Raises:
        APIError: 400, the body is not a form, or a field is invalid; 408, the body is too slow;
            413, too long; 503, the server has too many bodies in memory.
    """
    if not is_form(request):
        raise APIError(
            "the request body is not a form: send multipart/form-data with the field file",
            param="file",
            code="invalid_form",
        )
    file = io.BytesIO()
    most, seconds = limits.max_audio_bytes, limits.body_timeout
    form = await read_form(request, file, most + OVERHEAD, seconds, MAX_TEXT)
    body: dict[str, Any] = {} if form.filename is None else {"file": file.getvalue()}
    request.scope[BODY_BYTES] = size = file.tell()
    file.close()
    if size > most:
        raise APIError(
            f"the audio file has {size} bytes; the limit of this server is {most} "
            "(max_audio_bytes)",
            status=413,
            param="file",
            code="request_too_large",
        )
    for name, values in form.fields.items():
        if len(values) > 1 and not name.endswith("[]"):
            raise APIError(f"the form has the field {name!r:.64} twice", param=name)
        entry = _ENTRY.fullmatch(name)
        if entry is not None:  # clients write an object as one field for each of its keys
            inner = body.setdefault(entry[1], {})
            if isinstance(inner, dict):
                inner[entry[2]] = values[0]
        elif name != "file":
            body[name.removesuffix("[]")] = values if name.endswith("[]") else values[0]
    return validate_body(kind, body, ignored)


def _invalid(reason: str) -> APIError:
    return APIError(f"the body is not a valid form (multipart/form-data): {reason}", param="file")
