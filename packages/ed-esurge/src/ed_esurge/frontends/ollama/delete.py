"""`DELETE /api/delete`: remove a derived model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from starlette.requests import Request
from starlette.responses import Response

from ed_esurge.frontends.library.loading import has_weights
from ed_esurge.frontends.ollama.create import get_definition_store
from ed_esurge.frontends.ollama.requests import ModelReference
from ed_esurge.server.generation.served_models import ServedModels
from ed_esurge.server.http.errors import APIError
from ed_esurge.server.http.fields import RequestBody
from ed_esurge.server.routing import REFUSALS, Endpoint


class DeleteRequest(RequestBody):
    """Body of `DELETE /api/delete`."""

    ALIASES: ClassVar[Mapping[str, str]] = {"name": "model"}

    model: ModelReference


async def _delete_model(server: ServedModels, body: DeleteRequest, request: Request) -> Response:
    """Remove a derived model. Weights are never removed.

    Raises:
        APIError: 403, the model has weights; 404, the model does not exist.
    """
    if has_weights(server, body.model):
        raise APIError(
            f"{body.model!r} has weights, which the server does not remove: delete the folder of "
            "the model",
            status=403,
            param="model",
        )
    definitions = get_definition_store(server)
    if body.model not in definitions:
        server.find(body.model, "")  # raises the error
    definitions.remove(body.model)
    return Response(status_code=200)


ENDPOINTS = (
    Endpoint(
        "/api/delete",
        "Remove a derived model in the format of Ollama's API.",
        _delete_model,
        "text/plain",
        DeleteRequest,
        method="DELETE",
        whole_server=True,
        access="admin",
        refusals=tuple(REFUSALS),
    ),
)
