"""Bodies of requests: read within limits, parsed and checked without holding up other clients."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from ed_infra.options import Options
from fastapi import Request
from pydantic_core import from_json

from ed_esurge.config import ServerLimits
from ed_esurge.server.errors import APIError
from ed_esurge.server.fields import validated
from ed_esurge.server.unknown import IgnoredKeys

OptionsT = TypeVar("OptionsT", bound=Options)

# Bytes beyond which parsing goes to a thread.
LONG_BODY = 2**16


async def read(
    request: Request, kind: type[OptionsT], limits: ServerLimits, ignored: IgnoredKeys | None = None
) -> OptionsT:
    """The body of a request as one of the request models.

    Args:
        ignored: collects the unknown keys; None: unknown keys are refused.

    Raises:
        APIError: 400 no JSON, or a field is not as it should be; 408 too slow, 413 too long, 415
            compressed.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise APIError(
            f"the request body is compressed ({encoding}): send it as it is",
            status=415,
            code="unsupported_encoding",
        )
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        # Also what keeps a form on a foreign page from sending requests.
        raise APIError(
            "the request body is not a JSON object sent with Content-Type: application/json",
            code="invalid_json",
        )
    raw = await read_bytes(request, limits.max_body_bytes, limits.body_timeout)
    if len(raw) < LONG_BODY:
        return validated(kind, _parsed(raw), ignored)
    return await asyncio.to_thread(lambda: validated(kind, _parsed(raw), ignored))


async def read_bytes(request: Request, most: int, seconds: float) -> bytes:
    """The bytes of a body.

    Raises:
        APIError: 408 too slow, 413 too long.
    """
    said = request.headers.get("content-length", "")
    parts: list[bytes] = []
    size = int(said) if said.isdecimal() and len(said) < 20 else 0
    too_long = APIError(
        f"the request body is longer than {most} bytes, which is this server's limit",
        status=413,
        code="request_too_large",
    )
    if size > most:
        raise too_long
    size = 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise too_long
                parts.append(part)
    except TimeoutError:
        raise APIError(
            f"the request body did not arrive within {seconds:g} seconds",
            status=408,
            code="request_timeout",
        ) from None
    return b"".join(parts)


def _parsed(raw: bytes) -> Any:
    try:
        value = from_json(raw, allow_inf_nan=False)
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
