"""`POST /update_weights_from_disk`, with SGLang's name: replace the weights of a model."""

from __future__ import annotations

from typing import Annotated, Literal

from ed_infra.errors import CheckpointError, ConfigError, EasyDeLError
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse

from ed_esurge.server.generation.answers import WeightsUpdate
from ed_esurge.server.generation.models import ServedModel
from ed_esurge.server.http.errors import APIError, engine_unavailable, hide_paths
from ed_esurge.server.http.fields import RequestBody
from ed_esurge.server.operations.admin import inside
from ed_esurge.server.routing import post


class UpdateWeightsRequest(RequestBody):
    """Body of `POST /update_weights_from_disk`."""

    model_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_format: Literal["auto"] | None = None
    """SGLang's format of the files; only `auto` is possible."""
    model: str | None = None
    """The model, for a server with several models (extension)."""


async def update(model: ServedModel, body: UpdateWeightsRequest, request: Request) -> JSONResponse:
    """Replace the weights, one replica after another. Requests continue meanwhile.

    Raises:
        APIError: 403, updates are disabled, or the path is outside the directory of the server;
            404, the directory does not exist; 400, it has no weights of this model; 409, another
            update is running; 503, the engine does not run.
    """
    directory = model.state.weights_directory
    if directory is None:
        raise APIError(
            "updates of the weights are disabled: start the server with weights_directory, the "
            "directory of the checkpoints",
            status=403,
            code="weights_off",
        )
    load = getattr(model.engine, "load_weights", None)
    if load is None:
        raise APIError(f"the weights of {model.name!r} cannot be replaced", status=409)
    path = inside(directory, body.model_path, "weights", "model_path")
    try:
        await load(path)
    except CheckpointError as error:
        text = hide_paths(str(error).replace(str(path), body.model_path))
        raise APIError(text, param="model_path") from None
    except ConfigError as error:
        text = hide_paths(str(error).replace(str(path), body.model_path))
        raise APIError(text, status=409, param="model_path") from None
    except EasyDeLError as error:
        raise engine_unavailable(hide_paths(error)) from error
    return JSONResponse({"success": True, "message": "the weights were replaced"})


ENDPOINTS = (
    post(
        "/update_weights_from_disk",
        "Replace the weights of a model, if the server allows it.",
        update,
        UpdateWeightsRequest,
        WeightsUpdate,
        access="admin",
    ),
)
