"""Request bodies: read within limits, then parsed and validated without blocking other clients."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ed_infra.options import Options
from pydantic_core import from_json
from starlette.requests import Request

from ed_esurge.config import ServerLimits
from ed_esurge.server.http.admission import RESERVATION, Reservation
from ed_esurge.server.http.errors import APIError, find_api
from ed_esurge.server.http.fields import IgnoredKeys, validate_body

T = TypeVar("T")

#: Length in bytes above which work on a body would block the event loop for several milliseconds.
LONG_BODY = 2**13
#: Key of the scope for the length of the body.
BODY_BYTES = "ed_esurge.body_bytes"
# More threads would delay the event loop, because all threads share the interpreter lock.
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="ed-esurge-body")


def get_body_size(request: Request) -> int:
    """Return the length of a request's body in bytes."""
    return request.scope.get(BODY_BYTES, 0)


async def aside(work: Callable[[], T], size: int) -> T:
    """Return the result of work on `size` bytes. Run the work in a thread if `size` is large."""
    if size < LONG_BODY:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work)


async def in_thread(work: Callable[[], T]) -> T:
    """Return the result of work that reads files."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work)


_OptionsT = TypeVar("_OptionsT", bound=Options)

#: Maximum number of keys, lists and objects of a body, and of its values.
MAX_KEYS, MAX_ITEMS = 2**17, 2**20
_OPENING = (b":", b"[", b"{")
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


async def read_body(
    request: Request,
    kind: type[_OptionsT],
    limits: ServerLimits,
    ignored: IgnoredKeys | None = None,
) -> _OptionsT:
    """Return the body of a request as a request model.

    Args:
        ignored: receives the unknown keys; None = unknown keys are errors.

    Raises:
        APIError: 400, the body is not JSON, or a field is invalid; 408, the body is too slow; 413,
            too long; 415, compressed; 503, the server has too many bodies in memory.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise APIError(
            f"the request body is compressed ({encoding}): send the body without compression",
            status=415,
            code="unsupported_encoding",
        )
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = content_type == "application/json" or content_type.endswith("+json")
    if not is_json and not _is_plain_curl(request, content_type):
        # This check also rejects forms of foreign web pages.
        raise APIError(
            "the request body is not a JSON object sent with Content-Type: application/json",
            code="invalid_json",
        )
    parts = [
        chunk async for chunk in read_chunks(request, limits.max_body_bytes, limits.body_timeout)
    ]
    raw = b"".join(parts)
    request.scope[BODY_BYTES] = len(raw)
    return await aside(lambda: validate_body(kind, _parse_body(raw), ignored), len(raw))


def _is_plain_curl(request: Request, content_type: str) -> bool:
    """Return whether a program sent a body as `curl -d` does, and the API accepts such bodies.

    A form of a web page has the same type, and one of these headers.
    """
    headers = request.headers
    by_page = "origin" in headers or "sec-fetch-site" in headers or "referer" in headers
    if content_type != "application/x-www-form-urlencoded" or by_page:
        return False
    api = find_api(request.scope)
    return api is not None and api.accepts_plain_curl


async def read_chunks(request: Request, most: int, seconds: float) -> AsyncGenerator[bytes]:
    """Yield a body in the chunks that arrive. The bytes count as in flight until the request ends.

    Raises:
        APIError: 408, the body is too slow; 413, too long; 503, the server has too many bodies in
            memory.
    """
    reservation: Reservation = request.scope[RESERVATION]
    length = request.headers.get("content-length", "")
    size = int(length) if length.isdecimal() and len(length) < 20 else 0
    if size > most:
        raise _too_long(most)
    reservation.grow(request.scope, size)
    size = 0
    deadline = asyncio.get_running_loop().time() + seconds
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                chunk = await anext(stream, None)
        except TimeoutError:
            raise APIError(
                f"the request body did not arrive within {seconds:g} seconds",
                status=408,
                code="request_timeout",
            ) from None
        if chunk is None:
            return
        size += len(chunk)
        if size > most:
            raise _too_long(most)
        reservation.grow(request.scope, size)
        yield chunk


def _too_long(most: int) -> APIError:
    return APIError(
        f"the request body is longer than {most} bytes, the limit of this server",
        status=413,
        code="request_too_large",
    )


def parsed_json(raw: bytes) -> Any:
    """Return the value of a JSON text.

    The parser holds the interpreter lock, so the number of objects is checked first.

    Raises:
        ValueError: the text is not JSON, or exceeds `MAX_KEYS` or `MAX_ITEMS`.
    """
    if sum(map(raw.count, _OPENING)) > MAX_KEYS or raw.count(b",") > MAX_ITEMS:
        _check_structure(raw)
    return from_json(raw, allow_inf_nan=False)


def _check_structure(raw: bytes) -> None:
    """Count the objects of a JSON text outside its strings.

    The strings are found one by one, because one call for the entire text would hold the
    interpreter lock.

    Raises:
        ValueError: the text exceeds `MAX_KEYS` or `MAX_ITEMS`.
    """
    keys = items = at = 0
    for string in _STRING.finditer(raw):
        between, at = raw[at : string.start()], string.end()
        keys += sum(map(between.count, _OPENING))
        items += between.count(b",")
        if keys > MAX_KEYS or items > MAX_ITEMS:
            break
    tail = raw[at:]
    keys, items = keys + sum(map(tail.count, _OPENING)), items + tail.count(b",")
    if keys > MAX_KEYS:
        raise ValueError(f"more than {MAX_KEYS} keys, lists and objects")
    if items > MAX_ITEMS:
        raise ValueError(f"more than {MAX_ITEMS} values")


def _parse_body(raw: bytes) -> Any:
    try:
        value = parsed_json(raw)
    except ValueError as error:
        raise APIError(
            f"the request body is not valid JSON in Unicode: {error}", code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise APIError(
            "the request body is not a JSON object sent with Content-Type: application/json",
            code="invalid_json",
        )
    return value
