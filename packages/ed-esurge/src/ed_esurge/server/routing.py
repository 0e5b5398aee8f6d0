"""The description of an endpoint, its route, and the call of its handler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from ed_esurge.server.generation.abilities import EndpointAbility, unsupported_task
from ed_esurge.server.generation.models import ServedModel
from ed_esurge.server.generation.served_models import ServedModels
from ed_esurge.server.http.auth import Access, check_admin, get_owner
from ed_esurge.server.http.body import read_body
from ed_esurge.server.http.errors import ApiFormat, client_gone
from ed_esurge.server.http.fields import HEADER, IGNORED_KEYS, TOOLS_HEADER, RequestBody
from ed_esurge.server.http.forms import read_audio
from ed_esurge.server.http.streaming import EventStream

REFUSALS = {
    400: "The request is invalid; `param` names the field.",
    401: "The API key is missing or unknown.",
    403: "The server does not allow this operation, or the origin of the web page.",
    404: "The model or the resource does not exist.",
    408: "The request did not arrive, or was not answered, in time.",
    409: "The operation is not possible in the current state.",
    413: "The body is too long.",
    415: "The body is compressed.",
    421: "The server does not serve this host.",
    429: "Too many concurrent requests; see `Retry-After`.",
    500: "The server failed on this request.",
    503: "The engine cannot answer.",
}
#: Statuses of errors of a route that reads one resource, or a list.
READING = (401, 421)
LISTING = (*READING, 400, 404)


@dataclass(frozen=True)
class Endpoint:
    """An endpoint. Each module with handlers lists its endpoints in `ENDPOINTS`.

    Attributes:
        handler: the function that answers. With a body: receives the model of the request, the
            body and the request. Without a body: receives the `ServedModels` and the request.
        returns: model of the answer, or the media type of a text.
        accepts: model of the body; None without a body.
        streams: whether the answer can be a stream of events.
        error_statuses: statuses of errors.
        whole_server: whether a handler with a body receives the `ServedModels` instead of a model.
        access: who may call the endpoint of a server with keys.
        batched: whether the lines of a batch may call the endpoint.
        form: whether the body is a form with a file (multipart/form-data), instead of JSON.
        ability: what the model of the body must be able to do; None = the handler checks the model.
        api: the format of errors and streams; None = OpenAI's.
    """

    path: str
    summary: str
    handler: Callable[..., Awaitable[Response]]
    returns: type[BaseModel] | str
    accepts: type[RequestBody] | None = None
    streams: bool = False
    error_statuses: tuple[int, ...] = READING
    method: Literal["GET", "POST", "DELETE"] = "GET"
    whole_server: bool = False
    access: Access = "key"
    batched: bool = False
    form: bool = False
    ability: EndpointAbility | None = None
    api: ApiFormat | None = None


def post(
    path: str,
    summary: str,
    handler: Callable[[ServedModel, Any, Request], Awaitable[Response]],
    accepts: type[RequestBody],
    returns: type[BaseModel] | str,
    *,
    streams: bool = False,
    access: Access = "key",
    batched: bool = False,
    form: bool = False,
    ability: EndpointAbility | None = None,
    api: ApiFormat | None = None,
) -> Endpoint:
    """Return an endpoint that answers a body for one model."""
    return Endpoint(
        path,
        summary,
        handler,
        returns,
        accepts,
        streams,
        tuple(REFUSALS),
        "POST",
        access=access,
        batched=batched,
        form=form,
        ability=ability,
        api=api,
    )


class NamedRoute(Route):
    """A route that its request names in the scope, for the metrics."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        if match is Match.FULL:  # a partial match has a method that the route lacks
            child["route"] = self
        return match, child


def build_route(server: ServedModels, endpoint: Endpoint) -> NamedRoute:
    """Return the route of an endpoint. Model names may contain slashes."""
    path = endpoint.path.replace("{model}", "{model:path}")
    methods = ["GET", "HEAD"] if endpoint.method == "GET" else [endpoint.method]
    accepts, reads = endpoint.accepts, read_audio if endpoint.form else read_body

    async def handle(request: Request) -> Response:
        if endpoint.access == "admin":
            check_admin(request.scope)
        if accepts is None:
            return await endpoint.handler(server, request)
        unknown = server.state.unknown_fields
        ignored = request.scope[IGNORED_KEYS] = unknown.request()
        body = await reads(request, accepts, server.state.limits, ignored)
        unknown.log(ignored, endpoint.path)
        response = await dispatch(server, endpoint, body, request)
        for name, value in ((HEADER, ignored.header), (TOOLS_HEADER, ignored.tools_header)):
            if value is not None:
                response.headers[name] = value
        return response

    return NamedRoute(path, handle, methods=methods)


async def dispatch(
    server: ServedModels, endpoint: Endpoint, body: BaseModel, request: Request
) -> Response:
    """Return the answer of an endpoint to the body of a request, or to a line of a batch.

    The work is cancelled if the client leaves before its end. The handler of a form reads the body
    itself, and an operator's change is never cancelled.

    Raises:
        APIError: 400, the model of the body lacks the ability of the endpoint; 404, the model does
            not exist; otherwise see the endpoint.
    """
    if endpoint.whole_server:
        return await endpoint.handler(server, body, request)
    name = getattr(body, "model", None)
    async with AsyncExitStack() as stack:
        model = await stack.enter_async_context(server.using(name, get_owner(request.scope)))
        if endpoint.ability is not None and endpoint.ability not in model.abilities:
            raise unsupported_task(model, endpoint.ability)
        work = endpoint.handler(model, body, request)
        if endpoint.form or endpoint.access != "key":
            response = await work
        else:
            response = await model.lifetime(request).run(work)
            if response is None:
                return client_gone()
        if isinstance(response, EventStream):  # the model stays in memory until the stream ends
            response.held = stack.pop_all()
        return response
