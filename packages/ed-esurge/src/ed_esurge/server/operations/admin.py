"""What administrators do with the memory of an engine, under vLLM's names.

`POST /sleep` and `/wake_up` lend the memory of the device to a trainer beside the server, and
`POST /reset_prefix_cache` forgets cached prefixes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Annotated

from ed_infra.errors import CheckpointError, ConfigError, EasyDeLError
from fastapi import Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import Field

from ed_esurge.server.generation.answers import Sleeping
from ed_esurge.server.generation.models import ModelServer, ServedModel
from ed_esurge.server.http.auth import owner_of
from ed_esurge.server.http.errors import APIError, engine_unavailable
from ed_esurge.server.http.fields import Body
from ed_esurge.server.routing import READING, Endpoint, post

LEVELS = {"1": 1, "2": 2}


async def sleep(server: ModelServer, request: Request) -> JSONResponse:
    """Give the memory of the device to others; `level` and `model` are of the query.

    Raises:
        APIError: 400, `level` is neither 1 nor 2; 403, the server does not do that; 404, there is
            no such model; 409, the engine cannot sleep so; 503, it does not run.
    """
    models = _asked(server, request, ("level", "model"))
    level = LEVELS.get(request.query_params.get("level", "1"))
    if level is None:
        raise APIError(
            "level is 1, which keeps the weights in host memory, or 2, which forgets them",
            param="level",
            code="invalid_value",
        )
    for model in models:
        await _done(model.engine.sleep(level))
    return _state(models)


async def wake_up(server: ModelServer, request: Request) -> JSONResponse:
    """Go on after `sleep`; `model` is of the query.

    Raises:
        APIError: as `sleep`; 409, the weights were forgotten.
    """
    models = _asked(server, request, ("model",))
    for model in models:
        await _done(model.engine.wake_up())
    return _state(models)


async def is_sleeping(server: ModelServer, request: Request) -> JSONResponse:
    """Whether the models sleep, or the one that the query names. Raises APIError: as `sleep`."""
    return _state(_asked(server, request, ("model",)))


async def reset_prefix_cache(server: ModelServer, request: Request) -> Response:
    """Forget the cached prefixes of the models, or of the one that the query names.

    Running requests are computed anew, and prefixes in host memory are forgotten too, whatever
    vLLM's `reset_running_requests` and `reset_external` say.

    Raises:
        APIError: 400, a parameter is not known; 404, there is no such model; 503, an engine does
            not run.
    """
    _check_query(request, ("model", "reset_running_requests", "reset_external"))
    for model in _models(server, request):
        await _done(model.engine.reset_prefix_cache())
    return Response()


def _asked(server: ModelServer, request: Request, known: Sequence[str]) -> list[ServedModel]:
    """The models that a request means."""
    if not server.state.enable_sleep_mode:
        raise APIError(
            "this server does not sleep for its clients: start it with enable_sleep_mode",
            status=403,
            code="sleep_off",
        )
    _check_query(request, known)
    return _models(server, request)


def _check_query(request: Request, known: Sequence[str]) -> None:
    for name in request.query_params:
        if name not in known:
            raise APIError(
                f"{name!r:.50} is not known here: {', '.join(known)}",
                param=name[:50],
                code="unknown_parameter",
            )


def _models(server: ModelServer, request: Request) -> list[ServedModel]:
    name = request.query_params.get("model")
    return [*server.models] if name is None else [server.find(name, owner_of(request.scope))]


async def _done(work: Awaitable[None]) -> None:
    try:
        await work
    except ConfigError as error:
        raise APIError(str(error), status=409) from None
    except EasyDeLError as error:
        raise engine_unavailable(str(error)) from error


def _state(models: Sequence[ServedModel]) -> JSONResponse:
    return JSONResponse({"is_sleeping": all(model.engine.is_sleeping for model in models)})


Name = Annotated[str, Field(pattern=r"^[^\s\x00-\x1f]{1,256}$")]


class LoadAdapterRequest(Body):
    """Body of `POST /v1/load_lora_adapter`."""

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False
    """True: an adapter of that name is replaced."""
    model: str | None = None
    """The model that it is for, where a server has several (extension)."""
    owner: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Name or SHA-256 of the API keys that may use the adapter; null: every key (extension)."""


class UnloadAdapterRequest(Body):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: Name
    lora_int_id: int | None = None
    """vLLM's number, which names nothing here."""
    model: str | None = None


async def load(model: ServedModel, body: LoadAdapterRequest, request: Request) -> PlainTextResponse:
    """Serve an adapter under a name.

    Raises:
        APIError: 400, the adapter cannot be loaded, or no key belongs to its owner; 403, it lies
            outside the server's directory; 404, it is not there.
    """
    _check_open(model)
    owners = _owners(model, body.owner)
    path = _inside(model.adapter_directory, body.lora_path)
    if body.lora_name in model.names:
        raise APIError(
            f"{body.lora_name!r} is the model itself: choose another name", param="lora_name"
        )
    loaded = body.lora_name in model.adapters(model.owner)
    if loaded and not body.load_inplace:
        raise APIError(
            f"the LoRA adapter {body.lora_name!r} has already been loaded: unload it, or send "
            "load_inplace: true",
            param="lora_name",
        )
    try:
        if loaded:
            await model.engine.unload_lora_adapter(body.lora_name)
        if owners is None:
            model.adapter_owners.pop(body.lora_name, None)
        else:  # before it is there: nobody else must see it meanwhile
            model.adapter_owners[body.lora_name] = owners
        await model.engine.load_lora_adapter(body.lora_name, path)
    except (ConfigError, CheckpointError) as error:
        raise APIError(str(error).replace(str(path), body.lora_path), param="lora_path") from None
    except EasyDeLError as error:
        raise engine_unavailable(str(error)) from error
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload(
    model: ServedModel, body: UnloadAdapterRequest, request: Request
) -> PlainTextResponse:
    """Let no new request use an adapter; those that use it end as they would.

    Raises:
        APIError: 404, there is none of that name.
    """
    _check_open(model)
    if body.lora_name not in model.adapters(model.owner):
        raise APIError(
            f"the LoRA adapter {body.lora_name!r} is not loaded; GET /v1/models lists those that "
            "are",
            status=404,
            param="lora_name",
            code="model_not_found",
        )
    try:
        await model.engine.unload_lora_adapter(body.lora_name)
    except ConfigError as error:  # somebody else was quicker
        raise APIError(str(error), status=404, param="lora_name") from None
    except EasyDeLError as error:
        raise engine_unavailable(str(error)) from error
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _owners(model: ServedModel, wanted: str | None) -> frozenset[str] | None:
    """Return the digests of the keys that may use an adapter, administrators' keys included.

    Args:
        wanted: name or SHA-256 of the keys. None: every key.

    Raises:
        APIError: 400, the server has no such key.
    """
    if wanted is None:
        return None
    keys = model.state.keys
    owners = {key.sha256 for key in keys if wanted in (key.name, key.sha256)}
    if not owners:
        raise APIError(
            f"the owner {wanted!r} is neither the name nor the sha256 of an API key of this "
            "server: name a key of its api_key_file, or leave owner out",
            param="owner",
            code="invalid_value",
        )
    return frozenset(owners | {key.sha256 for key in keys if key.admin})


def _check_open(model: ServedModel) -> None:
    if not model.engine.config.max_loras:
        raise APIError(
            "this server serves no LoRA adapters: start the engine with max_loras, how many can be "
            "loaded at the same time",
            status=404,
            code="adapters_off",
        )
    if model.adapter_directory is None:
        raise APIError(
            "this server loads no adapters for its clients: start it with lora_directory, below "
            "which they may name them",
            status=403,
            code="adapters_off",
        )


def _inside(directory: Path | None, wanted: str) -> Path:
    """The directory of an adapter, links followed, which must lie below another one."""
    assert directory is not None, "checked before"
    root = directory.resolve()
    try:
        path = (root / wanted).resolve()
        inside = path.is_relative_to(root) and path != root
        there = inside and path.is_dir()
        # The files of an adapter may be links too.
        strays = there and any(
            not file.resolve().is_relative_to(root) for file in path.iterdir() if file.is_symlink()
        )
    except (OSError, ValueError, RuntimeError):  # too long, a zero byte, a loop of links
        inside = there = strays = False
    if not inside or strays:
        raise APIError(
            f"{wanted!r:.200} is not below the directory from which this server loads adapters: "
            "give a path relative to it",
            status=403,
            param="lora_path",
        )
    if not there:
        raise APIError(
            f"there is no directory {wanted!r:.200} with an adapter", status=404, param="lora_path"
        )
    return path


ENDPOINTS = (
    post(
        "/v1/load_lora_adapter",
        "Load a LoRA adapter, if the server allows it.",
        load,
        LoadAdapterRequest,
        "text/plain",
        access="admin",
    ),
    post(
        "/v1/unload_lora_adapter",
        "Unload a LoRA adapter.",
        unload,
        UnloadAdapterRequest,
        "text/plain",
        access="admin",
    ),
    Endpoint(
        "/reset_prefix_cache",
        "Clear the prefix cache.",
        reset_prefix_cache,
        "text/plain",
        refusals=(*READING, 400, 403, 404, 503),
        method="POST",
        access="admin",
    ),
    Endpoint(
        "/sleep",
        "Release the device memory of the engine, if the server allows it.",
        sleep,
        Sleeping,
        refusals=(*READING, 400, 403, 404, 409, 503),
        method="POST",
        access="admin",
    ),
    Endpoint(
        "/wake_up",
        "Resume after /sleep.",
        wake_up,
        Sleeping,
        refusals=(*READING, 400, 403, 404, 409, 503),
        method="POST",
        access="admin",
    ),
    Endpoint(
        "/is_sleeping",
        "Return whether the engine sleeps.",
        is_sleeping,
        Sleeping,
        refusals=(*READING, 400, 403, 404),
    ),
)
