"""The error envelopes of the OpenAI and the Anthropic API, for every answer that is not a success.

The official clients turn `{"error": {"message", "type", "param", "code"}}`, or Anthropic's
`{"type": "error", "error": {"type", "message"}}`, into typed exceptions.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ed_esurge.server.http.scope import Receive, Scope, Send

Part = str | int
# Fields whose name differs from a name that the body may use: the aliases of the request models.
_SPELLED: dict[Part, tuple[str, ...]] = {
    "json_schema": ("json_schema", "schema", "json"),
    "text_1": ("text_1", "queries", "data_1"),
    "text_2": ("text_2", "documents", "items", "data_2"),
}


def in_body(location: Sequence[Part], body: Any, *, missing: bool = False) -> list[Part]:
    """Return the parts of a location that are fields and positions of a body.

    Args:
        location: from an error of pydantic.
        body: the parsed JSON that was validated.
        missing: the last part is a field that the body lacks.
    """
    known, _ = _matched(tuple(location), body, missing)
    return known


def _matched(location: tuple[Part, ...], here: Any, missing: bool) -> tuple[list[Part], bool]:
    """The longest list of parts that is a path of the body, and whether the last part is in it."""
    if not location:
        return [], False
    head, rest = location[0], location[1:]
    if missing and not rest:
        return [head], True
    skipped = _matched(rest, here, missing)
    if isinstance(here, Mapping):
        head = next((name for name in _SPELLED.get(head, ()) if name in here), head)
        if head not in here:
            return skipped
        inner = here[head]
    elif isinstance(here, list) and isinstance(head, int) and head < len(here):
        inner = here[head]
    else:
        return skipped
    parts, last = _matched(rest, inner, missing)
    taken = [head, *parts], last or not rest
    return max(taken, skipped, key=lambda found: (len(found[0]), found[1]))


def spelled(parts: Sequence[Part]) -> str:
    """Write parts as a path: `messages[0].role`."""
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def joined(path: str | None, field: str) -> str:
    """Append a field, or a position in brackets, to a path."""
    if path is None:
        return field
    return f"{path}{field}" if field.startswith("[") else f"{path}.{field}"


#: Problems that one error reports, and the errors of a validation that are looked at for them.
MAX_PROBLEMS, MAX_EXAMINED = 8, 256
#: Characters of an error's message, of one problem in it, and of the name of a field.
MAX_MESSAGE, MAX_PROBLEM, MAX_PARAM = 2048, 240, 160


class APIError(Exception):
    """An error that a client should see, with the HTTP status it travels under.

    Messages quote what clients send, so `MAX_MESSAGE` and `MAX_PARAM` bound their length.

    Args:
        message: what was given, what is allowed, how to go on.
        status: HTTP status code.
        param: the request field at fault, as the client spells it.
        code: OpenAI's machine-readable code (`context_length_exceeded`, ...).
        type: OpenAI's error class; derived from the status when not given.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        type: str | None = None,
    ) -> None:
        self.message = _printable(shortened(message, MAX_MESSAGE))
        super().__init__(self.message)
        self.status = status
        self.param = None if param is None else _printable(shortened(param, MAX_PARAM))
        self.code = code
        self.type = type or ("invalid_request_error" if status < 500 else "server_error")

    def envelope(self) -> dict[str, Any]:
        """The JSON body of the answer."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """The whole answer."""
        headers = {}
        if self.status in (429, 503):
            headers["Retry-After"] = "1"
        if self.status in (408, 413):  # the rest of the request may still be on its way
            headers["Connection"] = "close"
        return ErrorResponse(self, headers)

    def anthropic_envelope(self) -> dict[str, Any]:
        """The JSON body of the answer as Anthropic's clients read errors.

        https://docs.anthropic.com/en/api/errors
        """
        kind = _ANTHROPIC_TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "api_error"
        )
        message = self.message
        if self.param is not None and self.param not in message:
            message = f"{self.param}: {message}"
        error: dict[str, Any] = {"type": kind, "message": message}
        if self.code is not None:
            error["details"] = {"error_code": self.code}
        return {"type": "error", "error": error}


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ErrorResponse(JSONResponse):
    """An error in the envelope of the API that the client called.

    The path decides when the response is sent, so that errors of middlewares have the envelope too.
    """

    def __init__(self, error: APIError, headers: Mapping[str, str]) -> None:
        super().__init__(error.envelope(), status_code=error.status, headers=headers)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_anthropic(scope["path"]):
            request_id = f"req_{uuid.uuid4().hex}"
            self.body = self.render({**self._error.anthropic_envelope(), "request_id": request_id})
            self.headers["Content-Length"] = str(len(self.body))
            self.headers["Request-Id"] = request_id
        await super().__call__(scope, receive, send)


def is_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Name fields of the chat request in errors as the client's own API spells them."""
    try:
        yield
    except APIError as error:
        if error.param is not None:
            error.param = names.get(error.param, error.param)
        raise


class Refusal(ValueError):
    """A value that a request model does not accept.

    Args:
        message: as in `APIError`.
        field: the field at fault, when a check of the whole model raises.
        code: as in `APIError`.
    """

    def __init__(self, message: str, field: str | None = None, *, code: str | None = None) -> None:
        super().__init__(message)
        self.field, self.code = field, code


def shortened(text: str, most: int) -> str:
    """Return a text without its middle where the text has more than `most` characters."""
    if len(text) <= most:
        return text
    half = (most - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def _printable(text: str) -> str:
    """JSON lets clients send halves of surrogate pairs, which no answer in UTF-8 can repeat."""
    return text.encode("utf-8", "backslashreplace").decode()


def engine_unavailable(reason: str = "the engine is not running") -> APIError:
    """503: nothing is wrong with the request; the process behind it cannot answer."""
    return APIError(
        f"{reason}; GET /health says more. Restart the server if this does not pass.",
        status=503,
        code="engine_unavailable",
    )


def from_validation(errors: Sequence[Any], body: Any = None) -> APIError:
    """Return one error that reports up to `MAX_PROBLEMS` problems and names the first field.

    Args:
        body: what was validated, so that fields are named as the client spells them.
    """
    lines: dict[str, None] = {}
    param = code = None
    for error in _of_best_branches(errors[:MAX_EXAMINED], body):
        if error["type"] == "json_invalid":
            reason = error.get("ctx", {}).get("error", error["msg"])
            return APIError(f"the request body is not valid JSON: {reason}", code="invalid_json")
        path = _path(error, body)
        refusal = error.get("ctx", {}).get("error")
        if isinstance(refusal, Refusal) and refusal.field is not None:
            path = joined(path, refusal.field)
        if path is None and error["type"] in ("model_attributes_type", "model_type"):
            return APIError(
                "the request body is not a JSON object sent with Content-Type: application/json",
                code="invalid_json",
            )
        if not lines:
            param = path
            code = "unknown_parameter" if error["type"] == "unknown_key" else "invalid_value"
            if error["type"] == "missing":
                code = "missing_required_parameter"
            if isinstance(refusal, Refusal) and refusal.code is not None:
                code = refusal.code
        message = _message(error)
        given = error.get("input")
        if error["type"] != "missing" and isinstance(given, str | int | float | bool):
            message = f"{message} (given {_quoted(given)})"
        line = f"{shortened(path, MAX_PARAM)}: {message}" if path else message
        lines[shortened(line, MAX_PROBLEM)] = None
    shown = [*lines][:MAX_PROBLEMS]
    more = " (and more)" if len(lines) > len(shown) or len(errors) > MAX_EXAMINED else ""
    return APIError("; ".join(shown) + more, param=param, code=code)


def _quoted(value: str | int | float | bool) -> str:
    """The beginning of a value. An integer may have more digits than Python converts to text."""
    if isinstance(value, str):
        return f"{value[:80]!r:.80}"
    if isinstance(value, int) and value.bit_length() > 256:
        return "an integer of many digits"
    return repr(value)


def _path(error: Mapping[str, Any], body: Any) -> str | None:
    """The field of an error, as the client spells it; None: the whole body."""
    parts: Sequence[str | int] = error["loc"]
    if body is not None:
        parts = in_body(parts, body, missing=error["type"] == "missing")
    if error["type"] in _OF_TAGS:
        parts = [*parts, "type"]
    return spelled(parts) or None


# Errors of a union whose members are told apart by the field `type`.
_OF_TAGS = frozenset({"union_tag_invalid", "union_tag_not_found"})
# Errors about the type of a value: each member of a union reports one.
_OF_TYPES = frozenset(
    {
        *("string_type", "list_type", "dict_type", "int_type", "float_type", "bool_type"),
        *("model_type", "model_attributes_type", "literal_error"),
    }
)


def _message(error: Mapping[str, Any]) -> str:
    """The message of an error, without the names of pydantic and of this server's classes."""
    context = error.get("ctx", {})
    match error["type"]:
        case "union_tag_invalid":
            return f"{context['tag']!r:.80} is not supported: use {context['expected_tags']}"
        case "union_tag_not_found":
            return "Field required"
        case "model_type" | "model_attributes_type" | "dict_type":
            return "Input should be an object"
        case _:
            return str(error["msg"]).removeprefix("Value error, ")


def _of_best_branches(errors: Sequence[Any], body: Any) -> list[Any]:
    """The errors of the union members that the client meant.

    Every member of a union reports why a value is not of its type. A problem deeper in the value
    shows that the value has the type of that member, so the others' reports say nothing.
    """
    if body is None or len(errors) < 2:
        return [*errors]
    paths = [
        tuple(in_body(error["loc"], body, missing=error["type"] == "missing")) for error in errors
    ]
    above = {path[:length] for path in paths for length in range(len(path))}
    return [
        error
        for error, path in zip(errors, paths, strict=True)
        if not (error["type"] in _OF_TYPES and path in above)
    ]


def client_gone() -> Response:
    """For the log only (nginx's 499): nobody reads it."""
    return Response(status_code=499)


def _with_headers(error: APIError, cause: HTTPException) -> JSONResponse:
    response = error.response()
    response.headers.update(cause.headers or {})  # Allow, of a 405
    return response


def install(app: FastAPI) -> None:
    """Register the handlers that answer in the envelope, whatever went wrong."""

    @app.exception_handler(APIError)
    async def _api(_: Request, error: APIError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def _request(_: Request, error: RequestValidationError) -> JSONResponse:
        return from_validation(error.errors()).response()

    @app.exception_handler(ValidationError)
    async def _params(_: Request, error: ValidationError) -> JSONResponse:
        return from_validation(error.errors(include_url=False)).response()

    @app.exception_handler(HTTPException)
    async def _http(_: Request, error: HTTPException) -> JSONResponse:
        return _with_headers(APIError(str(error.detail), status=error.status_code), error)

    @app.exception_handler(ClientDisconnect)
    async def _gone(_: Request, __: ClientDisconnect) -> Response:
        return client_gone()

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def _url(request: Request, error: HTTPException) -> JSONResponse:
        message = f"invalid URL ({request.method} {request.url.path})"
        known = APIError(message, status=error.status_code, code="unknown_url")
        return _with_headers(known, error)

    @app.exception_handler(Exception)  # the ASGI server logs the traceback
    async def _unexpected(_: Request, __: Exception) -> JSONResponse:
        return APIError(
            "the server failed on this request; its log has the traceback",
            status=500,
            code="internal_error",
        ).response()
