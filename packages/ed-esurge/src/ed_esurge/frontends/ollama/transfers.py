"""`POST /api/pull`, `/api/push` and `/api/blobs/{digest}`, which this server refuses."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from ed_esurge.frontends.ollama.replies import OllamaError
from ed_esurge.server.generation.served_models import ServedModels
from ed_esurge.server.http.errors import APIError
from ed_esurge.server.routing import Endpoint


async def _refuse(server: ServedModels, request: Request) -> Response:
    raise APIError(
        f"this server neither downloads nor uploads models, so {request.url.path[:160]} is not "
        "available: put a checkpoint into the directory of --model-dir",
        code="not_available",
    )


_refused = partial(
    Endpoint, answer=_refuse, returns=OllamaError, method="POST", refusals=(400, 401, 421)
)
ENDPOINTS = (
    _refused("/api/pull", "Refuse the download of a model."),
    _refused("/api/push", "Refuse the upload of a model."),
    _refused("/api/blobs/{digest}", "Refuse the upload of a file."),
)
