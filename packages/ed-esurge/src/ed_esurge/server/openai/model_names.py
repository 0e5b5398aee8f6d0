"""`GET /v1/models`: the names that models and their adapters are served under."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import JSONResponse

from ed_esurge.server.generation.site import Site
from ed_esurge.server.http.auth import owner_of


async def names(site: Site, request: Request) -> JSONResponse:
    """Return the models, and the adapters that the caller may use."""
    return JSONResponse({"object": "list", "data": site.cards(owner_of(request.scope))})


async def one(site: Site, request: Request) -> JSONResponse:
    """Return one model or adapter.

    Raises:
        APIError: 404.
    """
    name, owner = request.path_params["model"], owner_of(request.scope)
    site.find(name, owner)
    return JSONResponse(next(card for card in site.cards(owner) if card["id"] == name))
