"""`GET /api/tags`, `/api/ps`, `/api/version`: the models, those in memory, and the version."""

from __future__ import annotations

import math
import time

from starlette.requests import Request
from starlette.responses import JSONResponse

from ed_esurge.frontends.library.loading import measure_memory, on_accelerator
from ed_esurge.frontends.ollama.model_facts import ListedModel, ModelDetails, list_models
from ed_esurge.frontends.ollama.replies import timestamp
from ed_esurge.server.generation.answers import AnswerBody, Version
from ed_esurge.server.generation.served_models import ServedModels
from ed_esurge.server.http.auth import get_owner
from ed_esurge.server.http.body import in_thread
from ed_esurge.server.operations.health import server_version
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


#: Seconds until the expiry of a model that is never unloaded: Ollama's answers have a time.
FOREVER = 100 * 365.25 * 86400


class RunningModel(AnswerBody):
    """A model in memory."""

    name: str
    model: str
    size: int
    """Bytes of weights and pages."""
    size_vram: int
    """Bytes in the memory of accelerators."""
    digest: str
    details: ModelDetails
    expires_at: str
    context_length: int


class RunningModels(AnswerBody):
    """Answer of `GET /api/ps`."""

    models: list[RunningModel]


async def ps(server: ServedModels, request: Request) -> JSONResponse:
    """Return the models in memory."""
    running = []
    for model in server.models:
        facts = ListedModel.of(server, model.names[0], get_owner(request.scope))
        size = measure_memory(model.engine)
        remaining_seconds = math.inf if model.activity is None else model.activity.expires_in
        running.append(
            {
                "name": model.names[0],
                "model": model.names[0],
                "size": size,
                "size_vram": size if on_accelerator(model.engine) else 0,
                "digest": facts.digest,
                "details": facts.details(),
                "expires_at": timestamp(
                    time.time() + (FOREVER if math.isinf(remaining_seconds) else remaining_seconds)
                ),
                "context_length": model.prompts.max_model_len,
            }
        )
    return JSONResponse({"models": running})


async def _version(server: ServedModels, request: Request) -> JSONResponse:
    """Return the version of this server."""
    return JSONResponse({"version": server_version()})


ENDPOINTS = (
    Endpoint("/api/tags", "List the models in the format of Ollama's API.", tags, ModelTags),
    Endpoint(
        "/api/ps", "List the models in memory in the format of Ollama's API.", ps, RunningModels
    ),
    Endpoint(
        "/api/version",
        "Return the version of the server in the format of Ollama's API.",
        _version,
        Version,
        error_statuses=(421,),
        access="open",
    ),
)
