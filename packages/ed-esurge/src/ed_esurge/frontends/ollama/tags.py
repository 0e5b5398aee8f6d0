"""`GET /api/tags`: the models of the server."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse

from ed_esurge.frontends.ollama.model_facts import ModelDetails, list_models
from ed_esurge.frontends.ollama.replies import timestamp
from ed_esurge.server.generation.answers import AnswerBody
from ed_esurge.server.generation.served_models import ServedModels
from ed_esurge.server.http.auth import get_owner
from ed_esurge.server.http.body import in_thread
from ed_esurge.server.routing import Endpoint


class ModelTag(AnswerBody):
    """A model."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class ModelTags(AnswerBody):
    """Answer of `GET /api/tags`."""

    models: list[ModelTag]


async def tags(server: ServedModels, request: Request) -> JSONResponse:
    """Return the models that the key may use."""
    owner = get_owner(request.scope)

    def work() -> list[dict[str, object]]:
        return [
            {
                "name": one.name,
                "model": one.name,
                "modified_at": timestamp(one.modified),
                "size": one.size,
                "digest": one.digest,
                "details": one.details(),
            }
            for one in list_models(server, owner)
        ]

    return JSONResponse({"models": await in_thread(work)})


ENDPOINTS = (
    Endpoint("/api/tags", "List the models in the format of Ollama's API.", tags, ModelTags),
)
