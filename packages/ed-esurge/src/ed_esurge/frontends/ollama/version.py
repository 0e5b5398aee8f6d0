"""`GET /api/version`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse

from ed_esurge.server.generation.answers import Version
from ed_esurge.server.generation.served_models import ServedModels
from ed_esurge.server.operations.health import server_version
from ed_esurge.server.routing import Endpoint


async def _version(server: ServedModels, request: Request) -> JSONResponse:
    """Return the version of this server."""
    return JSONResponse({"version": server_version()})


ENDPOINTS = (
    Endpoint(
        "/api/version",
        "Return the version of the server in the format of Ollama's API.",
        _version,
        Version,
        refusals=(421,),
        access="open",
    ),
)
