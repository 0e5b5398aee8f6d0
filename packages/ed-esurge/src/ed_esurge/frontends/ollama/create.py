"""`POST /api/create`, `/api/copy` and `DELETE /api/delete`: models that are derived from others.

The server refuses `POST /api/pull`, `/api/push` and `/api/blobs/{digest}`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Annotated, ClassVar

from ed_infra.errors import ConfigError
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ed_esurge.frontends.library.definitions import DefinitionStore, ModelDefinition, ModelName
from ed_esurge.frontends.library.loading import get_library, has_weights
from ed_esurge.frontends.library.parameters import SamplingOptions, chat_fields
from ed_esurge.frontends.ollama.replies import LINES, OllamaError, json_line
from ed_esurge.frontends.ollama.requests import ModelReference, OllamaMessage, chat_messages
from ed_esurge.server.generation.answers import AnswerBody
from ed_esurge.server.generation.served_models import ServedModels
from ed_esurge.server.http.errors import APIError, rename_fields
from ed_esurge.server.http.fields import RequestBody, few, reject_field
from ed_esurge.server.http.streaming import RequestLifetime
from ed_esurge.server.routing import REFUSALS, Endpoint

MAX_LICENSES = 16
#: Maximum number of first messages of a derived model.
MAX_FIRST_MESSAGES = 256

NewModel = Annotated[ModelName, BeforeValidator(lambda name: str(name).removesuffix(":latest"))]


def _wrap_in_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class CreateRequest(RequestBody):
    """Body of `POST /api/create`."""

    ALIASES: ClassVar[Mapping[str, str]] = {"from": "source", "name": "model"}

    model: NewModel
    source: ModelReference | None = None
    """The model that answers; Ollama's name is `from`."""
    system: Annotated[str | None, Field(max_length=2**18)] = None
    messages: Annotated[list[OllamaMessage], few(MAX_FIRST_MESSAGES)] = Field(default_factory=list)
    parameters: SamplingOptions = Field(default_factory=SamplingOptions)
    license: Annotated[list[str], BeforeValidator(_wrap_in_list), few(MAX_LICENSES)] = Field(
        default_factory=list
    )
    stream: bool = True
    template: Annotated[
        None, reject_field("templates of Go; start the server with chat_template", "")
    ] = None
    files: Annotated[None, reject_field("uploads; put the model into --model-dir", {})] = None
    adapters: Annotated[
        None, reject_field("uploads; load an adapter with /v1/load_lora_adapter", {})
    ] = None
    quantize: Annotated[
        None, reject_field("quantization of one model; start the server with --quantization", "")
    ] = None


class CreateStatus(AnswerBody):
    """The state of an operation."""

    status: str


async def _create_model(server: ServedModels, body: CreateRequest, request: Request) -> Response:
    """Store a derived model.

    Raises:
        APIError: 400, the source is missing, the name belongs to a model with weights, or the
            server has no directory of models; 404, the source does not exist.
    """
    definitions = get_definition_store(server)
    if body.source is None:
        raise APIError("is missing: name the model that answers", param="from")
    if has_weights(server, body.model) or has_adapter(server, body.model):
        raise APIError(
            f"{body.model!r} is the name of a model with weights: choose another name",
            param="model",
        )
    if not has_weights(server, body.source) and body.source not in definitions:
        server.find(body.source, "")  # raises the error
    with rename_fields({"repeat_last_n": "parameters.repeat_last_n"}):
        chat_fields(body.parameters.values())  # checks the combination
    definition = ModelDefinition(
        source=body.source,
        system=body.system,
        messages=chat_messages(body.messages),
        parameters=body.parameters.values(),
        license=body.license,
    )
    add_model(definitions, body.model, definition, server)

    async def events() -> AsyncGenerator[str]:
        for status in ("writing manifest", "success"):
            yield json_line({"status": status})

    if body.stream:
        limits = server.state.limits
        lifetime = RequestLifetime(request, server.state.stopping, limits.request_timeout)
        return await lifetime.respond(events(), form=LINES)
    return JSONResponse({"status": "success"})


def add_model(
    definitions: DefinitionStore, name: str, definition: ModelDefinition, server: ServedModels
) -> None:
    """Store a definition.

    Raises:
        APIError: 400, the sources form a circle, or a limit is exceeded.
    """
    previous_definition = definitions.known.get(name)
    try:
        definitions.add(name, definition)
        definitions.resolve(name, lambda source: has_weights(server, source))
    except ConfigError as error:
        if previous_definition is not None:
            definitions.add(name, previous_definition)
        elif name in definitions:
            definitions.remove(name)
        raise APIError(str(error)) from None


def get_definition_store(server: ServedModels) -> DefinitionStore:
    """Return the derived models. Raises APIError: 400, the server has no directory of models."""
    library = get_library(server)
    if library is None:
        raise APIError(
            "this server stores no models: start it with --model-dir, the directory of its models"
        )
    return library.definitions


def has_adapter(server: ServedModels, name: str) -> bool:
    """Return whether an adapter of any owner has a name."""
    engines = (model.engine for model in server.models)
    return any(one.name == name for engine in engines for one in engine.list_lora_adapters())


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


async def _refuse(server: ServedModels, request: Request) -> Response:
    raise APIError(
        f"this server neither downloads nor uploads models, so {request.url.path[:160]} is not "
        "available: put a checkpoint into the directory of --model-dir",
        code="not_available",
    )


_refused = partial(
    Endpoint, handler=_refuse, returns=OllamaError, method="POST", error_statuses=(400, 401, 421)
)


ENDPOINTS = (
    Endpoint(
        "/api/create",
        "Derive a model from another model in the format of Ollama's API.",
        _create_model,
        CreateStatus,
        CreateRequest,
        streams=True,
        method="POST",
        whole_server=True,
        access="admin",
        error_statuses=tuple(REFUSALS),
    ),
    Endpoint(
        "/api/copy",
        "Give a model a further name in the format of Ollama's API.",
        _copy_model,
        "text/plain",
        CopyRequest,
        method="POST",
        whole_server=True,
        access="admin",
        error_statuses=tuple(REFUSALS),
    ),
    Endpoint(
        "/api/delete",
        "Remove a derived model in the format of Ollama's API.",
        _delete_model,
        "text/plain",
        DeleteRequest,
        method="DELETE",
        whole_server=True,
        access="admin",
        error_statuses=tuple(REFUSALS),
    ),
    _refused("/api/pull", "Refuse the download of a model."),
    _refused("/api/push", "Refuse the upload of a model."),
    _refused("/api/blobs/{digest}", "Refuse the upload of a file."),
)
