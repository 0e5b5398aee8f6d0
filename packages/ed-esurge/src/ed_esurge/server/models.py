"""`GET /v1/models`: the names that the model is served under."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse

from ed_esurge.server.served import Served


def _card(served: Served, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "ed-esurge",
        "root": served.name,
        "max_model_len": served.prompts.max_model_len,
    }


async def names(served: Served, request: Request) -> JSONResponse:
    """All of them."""
    cards = [_card(served, name) for name in served.names]
    return JSONResponse({"object": "list", "data": cards})


async def one(served: Served, request: Request) -> JSONResponse:
    """One of them.

    Raises:
        APIError: 404.
    """
    name = request.path_params["model"]
    served.check_model(name)
    return JSONResponse(_card(served, name))
