"""Errors in the format of OpenAI's API, or of the API of the path (`ApiFormat`).

The official clients turn `{"error": {"message", "type", "param", "code"}}` into typed exceptions.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

_LocationPart = str | int
# Other names of fields in the body: the aliases of the request models.
_SPELLED: dict[_LocationPart, tuple[str, ...]] = {
    "json_schema": ("json_schema", "schema", "json"),
    "text_1": ("text_1", "queries", "data_1"),
    "text_2": ("text_2", "documents", "items", "data_2"),
}


def in_body(
    location: Sequence[_LocationPart], body: object, *, missing: bool = False
) -> list[_LocationPart]:
    """Return the parts of a location that are fields and positions of a body.

    A location of pydantic also contains members of unions, tags and validators.

    Args:
        location: from an error of pydantic.
        body: the parsed JSON that was validated.
        missing: the last part is a field that the body lacks.
    """
    parts, _ = _match_location(tuple(location), body, missing)
    return parts


def _match_location(
    location: tuple[_LocationPart, ...], node: object, missing: bool
) -> tuple[list[_LocationPart], bool]:
    """Return the longest list of parts that is a path of the body, and whether it has the last
    part."""
    if not location:
        return [], False
    head, tail = location[0], location[1:]
    if missing and not tail:
        return [head], True
    skipped = _match_location(tail, node, missing)
    if isinstance(node, Mapping):
        head = next((name for name in _SPELLED.get(head, ()) if name in node), head)
        if head not in node:
            return skipped
        inner = node[head]
    elif isinstance(node, list) and isinstance(head, int) and head < len(node):
        inner = node[head]
    else:
        return skipped
    parts, last = _match_location(tail, inner, missing)
    candidate = [head, *parts], last or not tail
    return max(candidate, skipped, key=lambda match: (len(match[0]), match[1]))


def format_location(parts: Sequence[_LocationPart]) -> str:
    """Write parts as a path: `messages[0].role`."""
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def append_field(path: str | None, field: str) -> str:
    """Append a field, or a position in brackets, to a path."""
    if path is None:
        return field
    return f"{path}{field}" if field.startswith("[") else f"{path}.{field}"


#: Maximum number of problems in one error, and of validation errors that are examined for it.
MAX_PROBLEMS, MAX_EXAMINED = 8, 256
#: Maximum length in characters of an error message, of one problem, and of a field name.
MAX_MESSAGE, MAX_PROBLEM, MAX_PARAM = 2048, 240, 160


class APIError(Exception):
    """An error for a client, with an HTTP status.

    Messages quote the request, so `MAX_MESSAGE` and `MAX_PARAM` limit their length.

    Args:
        message: the problem with the value, the allowed values, and a solution.
        status: HTTP status code.
        param: name of the invalid field, in the spelling of the client.
        code: OpenAI's machine-readable code (`context_length_exceeded`, ...).
        type: OpenAI's error class; None = derived from the status.
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
        self.message = _printable(shorten_text(message, MAX_MESSAGE))
        super().__init__(self.message)
        self.status = status
        self.param = None if param is None else _printable(shorten_text(param, MAX_PARAM))
        self.code = code
        self.type = type or ("invalid_request_error" if status < 500 else "server_error")

    def envelope(self) -> dict[str, Any]:
        """Return the JSON body of the answer."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """Return the answer."""
        headers = {}
        if self.status in (429, 503):
            headers["Retry-After"] = "1"
        if self.status in (408, 413, 414, 431):  # the client may still be sending the body
            headers["Connection"] = "close"
        return ErrorResponse(self, headers)

    def full_message(self) -> str:
        """Return the message with the name of the invalid field."""
        if self.param is None or self.param in self.message:
            return self.message
        return f"{self.param}: {self.message}"


@dataclass(frozen=True)
class ApiFormat:
    """The format of the errors and streams of an API other than OpenAI's.

    Attributes:
        paths: matches the beginning of each path of the API.
        error: the model of an error, for the OpenAPI document.
        write_error: returns the body of an error, and further headers.
        stream_type: media type of streams.
        accepts_plain_curl: whether programs may send JSON with the type of a form, as `curl -d`
            does. Web pages may not.
    """

    paths: re.Pattern[str]
    error: type[BaseModel]
    write_error: Callable[[APIError], tuple[Mapping[str, Any], Mapping[str, str]]]
    stream_type: str = "text/event-stream"
    accepts_plain_curl: bool = False


def find_api(scope: Scope) -> ApiFormat | None:
    """Return the format of the API to which the path of a request belongs; None = OpenAI's."""
    apis: Sequence[ApiFormat] = scope["app"].state.apis if "app" in scope else ()
    return next((api for api in apis if api.paths.match(scope["path"])), None)


class ErrorResponse(JSONResponse):
    """An error in the format of the API that the client called.

    The format is selected by the path when the response is sent, so that errors of middleware have
    the right format as well.
    """

    def __init__(self, error: APIError, headers: Mapping[str, str]) -> None:
        super().__init__(error.envelope(), status_code=error.status, headers=headers)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        api = find_api(scope)
        if api is not None:
            body, headers = api.write_error(self._error)
            self.body = self.render(body)
            self.headers.update({"Content-Length": str(len(self.body)), **headers})
        await super().__call__(scope, receive, send)


@contextmanager
def rename_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the fields of errors of the block from the chat request to the API of the client."""
    try:
        yield
    except APIError as error:
        if error.param is not None:
            error.param = names.get(error.param, error.param)
        raise


class InvalidField(ValueError):
    """An invalid value of a request model.

    Args:
        message: see `APIError`.
        field: name of the invalid field, for a check of the complete model.
        code: see `APIError`.
    """

    def __init__(self, message: str, field: str | None = None, *, code: str | None = None) -> None:
        super().__init__(message)
        self.field, self.code = field, code


def shorten_text(text: str, most: int) -> str:
    """Return a text with at most `most` characters: remove the middle of a longer text."""
    if len(text) <= most:
        return text
    half = (most - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


# An absolute path of at least two folders or files, not part of a URL.
_ABSOLUTE_PATH = re.compile(r"(?<![\w.:/~-])(?:/[^\s/'\":,;()<>\]\[]+){2,}/?")


def hide_paths(error: object, *folders: object) -> str:
    """Return the text of an error of the server with names instead of absolute paths.

    Args:
        folders: folders of the server. Paths in a folder are relative to the folder.
    """
    text = str(error)
    for folder in folders:
        text = text.replace(f"{folder}/", "")
    return _ABSOLUTE_PATH.sub(lambda path: path[0].rstrip("/").rpartition("/")[2], text)


def _printable(text: str) -> str:
    """Escape lone surrogates, which JSON allows and UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode()


def engine_unavailable(reason: str = "the engine is not running") -> APIError:
    """Return the error 503 for an engine that cannot answer."""
    return APIError(
        f"{reason}; see GET /health. Restart the server if the problem persists.",
        status=503,
        code="engine_unavailable",
    )


def from_validation(errors: Sequence[Any], body: object = None) -> APIError:
    """Return one error that reports up to `MAX_PROBLEMS` problems and names the first field.

    Args:
        body: the validated body, to name fields in the spelling of the client.
    """
    lines: dict[str, None] = {}
    param = code = None
    for error in _select_best_branches(errors[:MAX_EXAMINED], body):
        if error["type"] == "json_invalid":
            reason = error.get("ctx", {}).get("error", error["msg"])
            return APIError(f"the request body is not valid JSON: {reason}", code="invalid_json")
        path = _path(error, body)
        refusal = error.get("ctx", {}).get("error")
        if isinstance(refusal, InvalidField) and refusal.field is not None:
            path = append_field(path, refusal.field)
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
            if isinstance(refusal, InvalidField) and refusal.code is not None:
                code = refusal.code
        message = _message(error)
        input_value = error.get("input")
        if error["type"] != "missing" and isinstance(input_value, str | int | float | bool):
            message = f"{message} (given {_quote_value(input_value)})"
        line = f"{shorten_text(path, MAX_PARAM)}: {message}" if path else message
        lines[shorten_text(line, MAX_PROBLEM)] = None
    problem_lines = [*lines][:MAX_PROBLEMS]
    more = " (and more)" if len(lines) > len(problem_lines) or len(errors) > MAX_EXAMINED else ""
    return APIError("; ".join(problem_lines) + more, param=param, code=code)


def _quote_value(value: str | int | float | bool) -> str:
    """Return the beginning of a value. Python does not convert very long integers to text."""
    if isinstance(value, str):
        return f"{value[:80]!r:.80}"
    if isinstance(value, int) and value.bit_length() > 256:
        return "an integer of many digits"
    return repr(value)


def _path(error: Mapping[str, Any], body: object) -> str | None:
    """Return the field of an error in the spelling of the client; None = the body itself."""
    parts: Sequence[str | int] = error["loc"]
    if body is not None:
        parts = in_body(parts, body, missing=error["type"] == "missing")
    if error["type"] in _OF_TAGS:
        parts = [*parts, "type"]
    return format_location(parts) or None


# Errors of a union whose members are distinguished by the field `type`.
_OF_TAGS = frozenset({"union_tag_invalid", "union_tag_not_found"})
# Errors about the type of a value, which every member of a union reports.
_OF_TYPES = frozenset(
    {
        *("string_type", "list_type", "dict_type", "int_type", "float_type", "bool_type"),
        *("model_type", "model_attributes_type", "literal_error"),
    }
)


def _message(error: Mapping[str, Any]) -> str:
    """Return the message of an error without names of pydantic and of classes."""
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


def _select_best_branches(errors: Sequence[Any], body: object) -> list[Any]:
    """Return the errors of the matching member of each union.

    Every member of a union reports a type error for a value of another member. A problem deeper in
    the value shows that the value has the type of that member, so the type errors are omitted.
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
    """Return the answer to a disconnected client, for the log (status 499 of nginx)."""
    return Response(status_code=499)


def _with_headers(error: APIError, cause: HTTPException) -> JSONResponse:
    response = error.response()
    response.headers.update(cause.headers or {})  # Allow, of a 405
    return response


async def _api(_: Request, error: APIError) -> Response:
    return error.response()


async def _invalid(_: Request, error: ValidationError) -> Response:
    return from_validation(error.errors(include_url=False)).response()


async def _http(_: Request, error: HTTPException) -> Response:
    return _with_headers(APIError(str(error.detail), status=error.status_code), error)


async def _gone(_: Request, __: Exception) -> Response:
    return client_gone()


async def _url(request: Request, error: HTTPException) -> Response:
    message = f"invalid URL ({request.method} {request.url.path})"
    api_error = APIError(message, status=error.status_code, code="unknown_url")
    return _with_headers(api_error, error)


async def _handle_unexpected_error(
    _: Request, __: Exception
) -> Response:  # uvicorn logs the traceback
    response = APIError(
        "the server failed on this request; see the traceback in its log",
        status=500,
        code="internal_error",
    ).response()
    # The error is raised again for the log, after which the server closes the connection.
    response.headers["Connection"] = "close"
    return response


#: Class of an exception, or status -> function that converts the exception to an answer.
ERROR_HANDLERS: Mapping[Any, Callable[[Request, Any], Awaitable[Response]]] = {
    APIError: _api,
    ValidationError: _invalid,
    HTTPException: _http,
    ClientDisconnect: _gone,
    404: _url,
    405: _url,
    Exception: _handle_unexpected_error,
}
