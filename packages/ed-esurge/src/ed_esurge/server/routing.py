"""From a body to an answer: what a request over HTTP and a line of a batch have in common."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel

from ed_esurge.server.endpoints import Endpoint
from ed_esurge.server.generation.site import Site
from ed_esurge.server.http.auth import owner_of


async def dispatch(
    site: Site, endpoint: Endpoint, body: BaseModel | None, request: Request
) -> Response:
    """The answer of an endpoint. A body goes to the model that it names.

    Raises:
        APIError: 404, there is no such model; else see the endpoint.
    """
    if body is None:
        return await endpoint.answer(site, request)
    if endpoint.of_the_site:
        return await endpoint.answer(site, body, request)
    served = site.find(getattr(body, "model", None), owner_of(request.scope))
    return await endpoint.answer(served, body, request)
