"""`POST /api/copy`: a further name of a model."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ed_esurge.frontends.library.definitions import ModelDefinition
from ed_esurge.frontends.library.loading import has_weights
from ed_esurge.frontends.ollama.create import NewModel, add_model, get_definition_store, has_adapter
from ed_esurge.frontends.ollama.requests import ModelReference
from ed_esurge.server.generation.served_models import ServedModels
from ed_esurge.server.http.errors import APIError
from ed_esurge.server.http.fields import RequestBody
from ed_esurge.server.routing import REFUSALS, Endpoint


class CopyRequest(RequestBody):
    """Body of `POST /api/copy`."""

    source: ModelReference
    destination: NewModel


async def _copy_model(server: ServedModels, body: CopyRequest, request: Request) -> Response:
    """Store a model that is derived from another model without changes. No weights are copied.

    Raises:
        APIError: see `create.create`.
    """
    definitions = get_definition_store(server)
    if has_weights(server, body.destination) or has_adapter(server, body.destination):
        raise APIError(
            f"{body.destination!r} is the name of a model with weights: choose another name",
            param="destination",
        )
    definition = definitions.known.get(body.source)
    if definition is None and not has_weights(server, body.source):
        server.find(body.source, "")  # raises the error
    add_model(
        definitions, body.destination, definition or ModelDefinition(source=body.source), server
    )
    return Response(status_code=200)


ENDPOINTS = (
    Endpoint(
        "/api/copy",
        "Give a model a further name in the format of Ollama's API.",
        _copy_model,
        "text/plain",
        CopyRequest,
        method="POST",
        whole_server=True,
        access="admin",
        refusals=tuple(REFUSALS),
    ),
)
