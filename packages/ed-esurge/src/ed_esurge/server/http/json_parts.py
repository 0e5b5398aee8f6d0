"""JSON text in pieces, for answers that one call would serialize for seconds.

A call of the JSON encoder holds the interpreter lock until it ends, also in a thread. The pieces of
this module are short, and their values are created when the pieces are written.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

#: Estimated bytes of an answer above which a thread writes the text.
LONG_ANSWER = 2**15
#: Characters that one call in a thread writes, and list items of one call of the encoder.
_SLICE, _GROUP = 2**18, 128
# One thread: more would delay the event loop, because all threads share the interpreter lock.
# Answers take turns after each slice.
_WRITER = ThreadPoolExecutor(1, thread_name_prefix="ed-esurge-answer")

# `json.dumps(..., ensure_ascii=False)` would build an encoder on every call.
encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def to_bytes(text: str) -> bytes:
    """Return text in UTF-8. The replacement character replaces halves of UTF-16 pairs, which a
    model may write as an escape of JSON."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


@dataclass(frozen=True)
class JsonItems:
    """A list whose items are created while the list is written.

    Attributes:
        create: returns an iterator over the items.
        group: number of items of one call of the encoder; 0 = items contain further pieces.
    """

    create: Callable[[], Iterable[Any]]
    group: int = _GROUP


@dataclass(frozen=True)
class JsonText:
    """A string whose characters are created while the string is written.

    Attributes:
        create: returns an iterator over parts of the string, which need no escapes.
    """

    create: Callable[[], Iterable[str]]


def json_parts(value: object) -> Iterator[str]:
    """Yield the JSON text of a value in pieces. The text equals that of `encode_json`.

    Args:
        value: a JSON value, which may contain `JsonItems` and `JsonText`.
    """
    if isinstance(value, JsonItems):
        yield from _list_parts(iter(value.create()), value.group)
    elif isinstance(value, JsonText):
        yield '"'
        yield from value.create()
        yield '"'
    elif isinstance(value, Mapping):
        opening = "{"
        for key, item in value.items():
            yield f"{opening}{encode_json(key)}:"
            yield from json_parts(item)
            opening = ","
        yield "{}" if opening == "{" else "}"
    elif isinstance(value, list | tuple) and value:
        nested = isinstance(value[0], Mapping | list | tuple | JsonItems | JsonText)
        yield from _list_parts(iter(value), 0 if nested and len(value) <= _GROUP else _GROUP)
    else:
        yield encode_json(value)


def _list_parts(items: Iterator[Any], group: int) -> Iterator[str]:
    opening = "["
    if group:
        while batch := list(islice(items, group)):
            yield f"{opening}{encode_json(batch)[1:-1]}"
            opening = ","
    else:
        for item in items:
            yield opening
            yield from json_parts(item)
            opening = ","
    yield "[]" if opening == "[" else "]"


async def write_json(value: object, size: int) -> list[bytes]:
    """Return the JSON text of a value in pieces.

    Args:
        value: see `json_parts`.
        size: estimated bytes. A thread writes a long text.
    """
    parts = json_parts(value)
    if size < LONG_ANSWER:
        return [to_bytes("".join(parts))]
    loop, pieces = asyncio.get_running_loop(), []
    while piece := await loop.run_in_executor(_WRITER, _write_slice, parts):
        pieces.append(piece)
    return pieces


async def write_text(value: object, size: int) -> str:
    """Return the JSON text of a value; see `write_json`."""
    if size < LONG_ANSWER:
        return to_bytes(encode_json(value)).decode()
    return b"".join(await write_json(value, size)).decode()


def _write_slice(parts: Iterator[str]) -> bytes:
    texts, count = [], 0
    for text in parts:
        texts.append(text)
        count += len(text)
        if count >= _SLICE:
            break
    return to_bytes("".join(texts))


async def answer_json(
    body: Mapping[str, Any], size: int = 0, headers: Mapping[str, str] | None = None
) -> JsonPieces:
    """Return an answer with a JSON object, which may contain `JsonItems`; see `write_json`."""
    return JsonPieces(await write_json(body, size), headers)


class JsonPieces(Response):
    """A JSON answer whose text is in pieces.

    Attributes:
        pieces: the text.
    """

    media_type = "application/json"

    def __init__(self, pieces: list[bytes], headers: Mapping[str, str] | None = None) -> None:
        self.pieces, self.status_code, self.background = pieces, 200, None
        self.body = b""
        size = sum(map(len, pieces))
        self.init_headers({"content-length": str(size), **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        for place, piece in enumerate(self.pieces, 1):
            more = place < len(self.pieces)
            await send({"type": "http.response.body", "body": piece, "more_body": more})
