"""`GET /v1/models`: the names that models and their adapters are served under."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import JSONResponse

from ed_esurge.server.site import Site


async def names(site: Site, request: Request) -> JSONResponse:
    """All of them."""
    return JSONResponse({"object": "list", "data": site.cards()})


async def one(site: Site, request: Request) -> JSONResponse:
    """One of them.

    Raises:
        APIError: 404.
    """
    name = request.path_params["model"]
    site.find(name)
    return JSONResponse(next(card for card in site.cards() if card["id"] == name))
