"""One line of a batch: a request as JSON, and its answer as JSON."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Annotated, Any, Literal

from ed_infra.options import Options
from fastapi import Request
from pydantic import Field, ValidationError

from ed_esurge.server.endpoints import ENDPOINTS, Endpoint
from ed_esurge.server.generation.site import Site
from ed_esurge.server.http.auth import OWNER
from ed_esurge.server.http.body import parsed_json
from ed_esurge.server.http.errors import APIError, from_validation
from ed_esurge.server.http.fields import validated
from ed_esurge.server.http.threads import BODY_BYTES, aside
from ed_esurge.server.routing import dispatch

logger = logging.getLogger(__name__)

#: What a batch may ask.
BATCHED: dict[str, Endpoint] = {
    one.path: one
    for one in ENDPOINTS
    if one.path
    in (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/score",
        "/v1/rerank",
    )
}


class Line(Options):
    """A request of a batch file."""

    custom_id: Annotated[str, Field(min_length=1, max_length=512)]
    method: Literal["POST"] = "POST"
    url: str
    body: dict[str, Any]


async def answer_line(
    site: Site,
    raw: bytes,
    name: str,
    *,
    owner: str = "",
    endpoint: str | None = None,
    seen: set[str] | None = None,
) -> dict[str, Any]:
    """Answer a line, whatever it is: what is wrong with it is its answer.

    Args:
        name: of the answer.
        owner: whose line it is, see `auth.owner_of`.
        endpoint: the only one that lines may name; None: each of `BATCHED`.
        seen: ids of the lines before; this one's is added.

    Returns:
        `id`, `custom_id`, and `response` (`status_code`, `request_id`, `body`) or `error` (`code`,
        `message`).
    """
    entry: dict[str, Any] = {"id": name, "custom_id": None, "response": None, "error": None}
    try:
        line = await aside(lambda: Line.model_validate(_parsed(site, raw)), len(raw))
        entry["custom_id"] = line.custom_id
        _check(line, endpoint, seen)
    except ValidationError as error:
        entry["error"] = _error(from_validation(error.errors(include_url=False)))
        return entry
    except APIError as error:
        entry["error"] = _error(error)
        return entry
    except ValueError as error:
        entry["error"] = {"code": "invalid_json", "message": f"the line is not JSON: {error}"}
        return entry
    status, body = await _answer(site, BATCHED[line.url], line.body, raw, owner)
    entry["response"] = {"status_code": status, "request_id": body.get("id", name), "body": body}
    return entry


def expired_line(raw: bytes, name: str) -> dict[str, Any]:
    """The entry of a line that was not answered in the time of its batch."""
    message = "this request could not be executed before the completion window expired"
    return _unanswered(raw, name, "batch_expired", message)


def interrupted_line(raw: bytes, name: str) -> dict[str, Any]:
    """The entry of a line that the server was answering when its process died."""
    message = (
        "the server's process died while it answered this request, so the server does not answer "
        "the request again: send it in another batch if it was not the cause"
    )
    return _unanswered(raw, name, "server_died", message)


def _unanswered(raw: bytes, name: str, code: str, message: str) -> dict[str, Any]:
    try:
        custom_id = Line.model_validate(parsed_json(raw)).custom_id
    except ValueError:  # it is no line; nobody will know
        custom_id = None
    error = {"code": code, "message": message}
    return {"id": name, "custom_id": custom_id, "response": None, "error": error}


def succeeded(entry: dict[str, Any]) -> bool:
    """Whether an answered line has a result."""
    return entry["response"] is not None and entry["response"]["status_code"] == 200


def _check(line: Line, endpoint: str | None, seen: set[str] | None) -> None:
    allowed = (endpoint,) if endpoint is not None else tuple(BATCHED)
    if line.url not in allowed:
        raise APIError(
            f"the url {line.url!r:.100} cannot be asked here: {', '.join(allowed)}",
            param="url",
            code="invalid_url",
        )
    if line.body.get("stream"):
        raise APIError("a batch has no streams: drop stream", param="stream", code="invalid_value")
    if seen is not None:
        if line.custom_id in seen:
            raise APIError(
                f"an earlier line has the custom_id {line.custom_id!r:.100} too",
                param="custom_id",
                code="duplicate_custom_id",
            )
        seen.add(line.custom_id)


async def _answer(
    site: Site, endpoint: Endpoint, body: dict[str, Any], raw: bytes, owner: str
) -> tuple[int, Any]:
    """Return status and body, as the owner of the batch would get them over HTTP."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": endpoint.path,
        "headers": [],
        OWNER: owner,
        BODY_BYTES: len(raw),
    }

    async def stays() -> Any:  # a client that never leaves
        await asyncio.Event().wait()

    takes = endpoint.takes
    assert takes is not None, "what a batch may ask has a body"
    try:
        ignored = site.state.unknown_fields.request()
        request = await aside(lambda: validated(takes, body, ignored), len(raw))
        site.state.unknown_fields.log(ignored, endpoint.path)
        response = await dispatch(site, endpoint, request, Request(scope, stays))
    except APIError as error:
        response = error.response()
    except ValidationError as error:
        response = from_validation(error.errors(include_url=False)).response()
    except Exception:
        logger.exception("a line of a batch failed")
        response = APIError("the server failed on this request", status=500).response()
    return response.status_code, json.loads(bytes(response.body))


def _parsed(site: Site, raw: bytes) -> Any:
    most = site.state.limits.max_body_bytes
    if len(raw) > most:
        raise APIError(
            f"the line is longer than {most} bytes, which is this server's limit",
            code="request_too_large",
        )
    return parsed_json(raw)


def _error(error: APIError) -> dict[str, Any]:
    return {"code": error.code or error.type, "message": error.message}
