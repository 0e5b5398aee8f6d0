"""The answer to one line of a batch: a request as JSON."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from ed_infra.options import Options
from pydantic import Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from ed_esurge.server.generation.served_models import ServedModels
from ed_esurge.server.http.admission import OVERLOADED, RESERVATION, Reservation
from ed_esurge.server.http.auth import OWNER
from ed_esurge.server.http.body import BODY_BYTES, LONG_BODY, aside, parsed_json
from ed_esurge.server.http.errors import APIError, from_validation
from ed_esurge.server.http.fields import validate_body
from ed_esurge.server.http.json_parts import JsonPieces, to_bytes
from ed_esurge.server.routing import Endpoint, dispatch

logger = logging.getLogger(__name__)

# Seconds until a line is repeated that found too many bytes in flight, and their maximum.
RETRY_SECONDS, MAX_RETRY_SECONDS = 0.5, 16.0


@dataclass(frozen=True)
class AnswerPieces:
    """The JSON text of a long answer in pieces, which no call parses or serializes again.

    Attributes:
        pieces: the text.
        reservation: the bytes in flight until the text is written.
    """

    pieces: list[bytes]
    reservation: Reservation


def release_entry(entry: dict[str, Any]) -> None:
    """Release the bytes of an entry that was written."""
    body = (entry["response"] or {}).get("body")
    if isinstance(body, AnswerPieces):
        body.reservation.close()


class BatchLine(Options):
    """A line of a batch file."""

    custom_id: Annotated[str, Field(min_length=1, max_length=512)]
    method: Literal["POST"] = "POST"
    url: str
    body: dict[str, Any]


async def answer_line(
    server: ServedModels,
    raw: bytes,
    name: str,
    endpoints: Mapping[str, Endpoint],
    *,
    owner: str = "",
    seen: set[str] | None = None,
) -> dict[str, Any]:
    """Answer a line. The answer to an invalid line is an error.

    Args:
        name: id of the answer.
        endpoints: the endpoints that the line may call, by path.
        owner: owner of the line, see `http.auth.get_owner`.
        seen: custom ids of the previous lines; the id of this line is added.

    Returns:
        `id`, `custom_id`, and `response` (`status_code`, `request_id`, `body`) or `error` (`code`,
        `message`).
    """
    entry: dict[str, Any] = {"id": name, "custom_id": None, "response": None, "error": None}
    try:
        line = await aside(lambda: BatchLine.model_validate(_parse_line(server, raw)), len(raw))
        entry["custom_id"] = line.custom_id
        _check(line, endpoints, seen)
    except ValidationError as error:
        entry["error"] = _error(from_validation(error.errors(include_url=False)))
        return entry
    except APIError as error:
        entry["error"] = _error(error)
        return entry
    except ValueError as error:
        entry["error"] = {"code": "invalid_json", "message": f"the line is not JSON: {error}"}
        return entry
    entry["response"] = await _answer(server, endpoints[line.url], line.body, raw, owner, name)
    return entry


def line_pieces(entry: dict[str, Any], *, ascii_only: bool = True) -> list[bytes]:
    """Return an entry as a line of JSON in pieces, with the line break."""
    response = entry["response"] or {}
    body = response.get("body")
    if not isinstance(body, AnswerPieces):
        return [to_bytes(json.dumps(entry, ensure_ascii=ascii_only)) + b"\n"]
    start = json.dumps({**entry, "response": None}, ensure_ascii=ascii_only)
    head = json.dumps({**response, "body": None}, ensure_ascii=ascii_only)
    prefix, _, suffix = start.partition('"response": null')
    opened = f'{prefix}"response": {head.removesuffix("null}")}'
    return [to_bytes(opened), *body.pieces, to_bytes(f"}}{suffix}\n")]


def expired_line(raw: bytes, name: str) -> dict[str, Any]:
    """Return the entry of a line that was not answered before its batch expired."""
    message = "this request could not be executed before the completion window expired"
    return _build_error_entry(raw, name, "batch_expired", message)


def interrupted_line(raw: bytes, name: str) -> dict[str, Any]:
    """Return the entry of a line whose answer was interrupted by the end of the process."""
    message = (
        "the process of the server died while it answered this request, and the server does not "
        "retry such a request: send the request in another batch if it was not the cause"
    )
    return _build_error_entry(raw, name, "server_died", message)


def _build_error_entry(raw: bytes, name: str, code: str, message: str) -> dict[str, Any]:
    try:
        custom_id = BatchLine.model_validate(parsed_json(raw)).custom_id
    except ValueError:  # the line is invalid and has no id
        custom_id = None
    error = {"code": code, "message": message}
    return {"id": name, "custom_id": custom_id, "response": None, "error": error}


def is_successful(entry: dict[str, Any]) -> bool:
    """Return whether a line was answered with status 200."""
    return entry["response"] is not None and entry["response"]["status_code"] == 200


def _check(line: BatchLine, endpoints: Mapping[str, Endpoint], seen: set[str] | None) -> None:
    if line.url not in endpoints:
        raise APIError(
            f"the url {line.url!r:.100} is not supported here: use {', '.join(endpoints)}",
            param="url",
            code="invalid_url",
        )
    if line.body.get("stream"):
        raise APIError("a batch does not stream: omit stream", param="stream", code="invalid_value")
    if seen is not None:
        if line.custom_id in seen:
            raise APIError(
                f"another line has the same custom_id {line.custom_id!r:.100}",
                param="custom_id",
                code="duplicate_custom_id",
            )
        seen.add(line.custom_id)


async def _answer(
    server: ServedModels,
    endpoint: Endpoint,
    body: dict[str, Any],
    raw: bytes,
    owner: str,
    name: str,
) -> dict[str, Any]:
    """Return status, id and body of the answer, as over HTTP.

    A line that finds too many bytes in flight is repeated later.
    """
    wait = RETRY_SECONDS
    while True:
        reservation = Reservation(server.state.budget)
        response = None
        try:
            response = await _respond(server, endpoint, body, raw, owner, reservation)
        finally:
            if not isinstance(response, JsonPieces):
                reservation.close()
        if response is not None:
            break
        await asyncio.sleep(wait)
        wait = min(2 * wait, MAX_RETRY_SECONDS)
    pieces = response.pieces if isinstance(response, JsonPieces) else [bytes(response.body)]
    fields: dict[str, Any] = {"status_code": response.status_code}
    if sum(map(len, pieces)) < LONG_BODY:
        reservation.close()
        answer = json.loads(b"".join(pieces))
        return {**fields, "request_id": answer.get("id", name), "body": answer}
    label = response.headers.get("x-request-id", name)
    return {**fields, "request_id": label, "body": AnswerPieces(pieces, reservation)}


async def _respond(
    server: ServedModels,
    endpoint: Endpoint,
    body: dict[str, Any],
    raw: bytes,
    owner: str,
    reservation: Reservation,
) -> Response | None:
    """Return the answer; None if too many bytes are in flight."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": endpoint.path,
        "headers": [],
        OWNER: owner,
        BODY_BYTES: len(raw),
        RESERVATION: reservation,
    }

    async def never_disconnects() -> Any:
        await asyncio.Event().wait()

    kind = endpoint.accepts
    assert kind is not None, "every endpoint of batches has a body"
    try:
        ignored = server.state.unknown_fields.request()
        request = await aside(lambda: validate_body(kind, body, ignored), len(raw))
        server.state.unknown_fields.log(ignored, endpoint.path)
        return await dispatch(server, endpoint, request, Request(scope, never_disconnects))
    except APIError as error:
        return None if error.code == OVERLOADED else error.response()
    except ValidationError as error:
        return from_validation(error.errors(include_url=False)).response()
    except Exception:
        logger.exception("a line of a batch failed")
        return APIError("the server failed on this request", status=500).response()


def _parse_line(server: ServedModels, raw: bytes) -> Any:
    most = server.state.limits.max_body_bytes
    if len(raw) > most:
        raise APIError(
            f"the line is longer than {most} bytes, the limit of this server",
            code="request_too_large",
        )
    return parsed_json(raw)


def _error(error: APIError) -> dict[str, Any]:
    return {"code": error.code or error.type, "message": error.message}
