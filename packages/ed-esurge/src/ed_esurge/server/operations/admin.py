"""Endpoints for administrators, with vLLM's names: sleep, the prefix cache, LoRA adapters.

A trainer on the same device can use its memory between `POST /sleep` and `POST /wake_up`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Annotated

from ed_infra.errors import CheckpointError, ConfigError, EasyDeLError
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ed_esurge.server.generation.answers import Sleeping
from ed_esurge.server.generation.models import ServedModel
from ed_esurge.server.generation.served_models import ServedModels
from ed_esurge.server.http.auth import get_owner
from ed_esurge.server.http.errors import APIError, engine_unavailable, hide_paths
from ed_esurge.server.http.fields import RequestBody
from ed_esurge.server.routing import READING, Endpoint, post

_LEVELS = {"1": 1, "2": 2}


async def sleep(server: ServedModels, request: Request) -> JSONResponse:
    """Release the device memory of the models; query parameters: `level` and `model`.

    Raises:
        APIError: 400, `level` is neither 1 nor 2; 403, sleep mode is disabled; 404, the model does
            not exist; 409, the engine does not support the level; 503, the engine does not run.
    """
    models = _get_requested_models(server, request, ("level", "model"))
    level = _LEVELS.get(request.query_params.get("level", "1"))
    if level is None:
        raise APIError(
            "level must be 1 (keeps the weights in host memory) or 2 (drops the weights)",
            param="level",
            code="invalid_value",
        )
    for model in models:
        await _done(model.engine.sleep(level))
    return _state(models)


async def wake_up(server: ServedModels, request: Request) -> JSONResponse:
    """Resume after `sleep`; query parameter: `model`.

    Raises:
        APIError: see `sleep`; 409, the weights were dropped.
    """
    models = _get_requested_models(server, request, ("model",))
    for model in models:
        await _done(model.engine.wake_up())
    return _state(models)


async def is_sleeping(server: ServedModels, request: Request) -> JSONResponse:
    """Return whether the models sleep; query parameter: `model`. Raises APIError: see `sleep`."""
    return _state(_get_requested_models(server, request, ("model",)))


async def reset_prefix_cache(server: ServedModels, request: Request) -> Response:
    """Clear the prefix cache of the models; query parameter: `model`.

    Running requests are recomputed, and prefixes in host memory are cleared as well, independent
    of vLLM's parameters `reset_running_requests` and `reset_external`.

    Raises:
        APIError: 400, a parameter is unknown; 404, the model does not exist; 503, an engine does
            not run.
    """
    _check_query(request, ("model", "reset_running_requests", "reset_external"))
    for model in _models(server, request):
        await _done(model.engine.reset_prefix_cache())
    return Response()


def _get_requested_models(
    server: ServedModels, request: Request, parameters: Sequence[str]
) -> list[ServedModel]:
    if not server.state.enable_sleep_mode:
        raise APIError(
            "sleep mode is disabled: start the server with enable_sleep_mode",
            status=403,
            code="sleep_off",
        )
    _check_query(request, parameters)
    return _models(server, request)


def _check_query(request: Request, parameters: Sequence[str]) -> None:
    for name in request.query_params:
        if name not in parameters:
            raise APIError(
                f"the parameter {name!r:.50} is unknown: use {', '.join(parameters)}",
                param=name[:50],
                code="unknown_parameter",
            )


def _models(server: ServedModels, request: Request) -> list[ServedModel]:
    name = request.query_params.get("model")
    return [*server.models] if name is None else [server.find(name, get_owner(request.scope))]


async def _done(work: Awaitable[None]) -> None:
    try:
        await work
    except ConfigError as error:
        raise APIError(hide_paths(error), status=409) from None
    except EasyDeLError as error:
        raise engine_unavailable(hide_paths(error)) from error


def _state(models: Sequence[ServedModel]) -> JSONResponse:
    return JSONResponse({"is_sleeping": all(model.engine.is_sleeping for model in models)})


_AdapterName = Annotated[str, Field(pattern=r"^[^\s\x00-\x1f]{1,256}$")]


class LoadAdapterRequest(RequestBody):
    """Body of `POST /v1/load_lora_adapter`."""

    lora_name: _AdapterName
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False
    """Whether to replace a loaded adapter with the same name."""
    model: str | None = None
    """The model of the adapter, for a server with several models (extension)."""
    owner: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Name or SHA-256 of the API keys that may use the adapter; null = every key (extension)."""


class UnloadAdapterRequest(RequestBody):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: _AdapterName
    lora_int_id: int | None = None
    """vLLM's number of the adapter; ignored."""
    model: str | None = None


async def _load_adapter(
    model: ServedModel, body: LoadAdapterRequest, request: Request
) -> PlainTextResponse:
    """Load an adapter under a name.

    Raises:
        APIError: 400, the adapter cannot be loaded, or the owner has no key; 403, the path is
            outside the server's directory; 404, the directory does not exist.
    """
    _check_open(model)
    owners = _owners(model, body.owner)
    assert model.adapter_directory is not None, "checked by _check_open"
    path = inside(model.adapter_directory, body.lora_path, "adapter", "lora_path")
    # The change continues after its client has left, so an adapter never has the wrong owners.
    await asyncio.shield(asyncio.ensure_future(_load(model, body, path, owners)))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def _load(
    model: ServedModel, body: LoadAdapterRequest, path: Path, owners: frozenset[str] | None
) -> None:
    """Load an adapter, and store its owners. One adapter of a model changes at a time."""
    name = body.lora_name
    async with model.adapter_lock:
        _check_name(model, name)
        loaded = any(adapter.name == name for adapter in model.engine.list_lora_adapters())
        if loaded and not (body.load_inplace and name in model.adapters(model.owner)):
            raise APIError(
                f"the LoRA adapter {name!r} has already been loaded: unload it, or send "
                "load_inplace: true",
                param="lora_name",
            )
        try:
            if loaded:
                await _unload(model, name)
            model.adapter_owners.pop(name, None)
            if owners is not None:  # before loading, so that other keys never see the adapter
                model.adapter_owners[name] = owners
            await model.engine.load_lora_adapter(name, path)
        except (ConfigError, CheckpointError) as error:
            raise APIError(
                hide_paths(str(error).replace(str(path), body.lora_path)), param="lora_path"
            ) from None
        except EasyDeLError as error:
            raise engine_unavailable(hide_paths(error)) from error
        finally:
            model.drop_adapter_owners()


def _check_name(model: ServedModel, name: str) -> None:
    """Check that no other model, and no adapter of another model, has a name.

    Raises:
        APIError: 400.
    """
    if name in model.names or model.state.is_model(name):
        raise APIError(f"{name!r} is the name of the model: choose another name", param="lora_name")
    for other_model in model.state.all_models():
        adapters = (one.name for one in other_model.engine.list_lora_adapters())
        if other_model.engine is not model.engine and name in adapters:
            raise APIError(
                f"{name!r} is an adapter of the model {other_model.names[0]!r}: choose another "
                "name",
                param="lora_name",
            )


async def _unload(model: ServedModel, name: str) -> None:
    await model.engine.unload_lora_adapter(name)
    model.drop_adapter_owners()


async def unload(
    model: ServedModel, body: UnloadAdapterRequest, request: Request
) -> PlainTextResponse:
    """Unload an adapter. Unfinished requests continue to use the adapter.

    Raises:
        APIError: 404, the adapter is not loaded.
    """
    _check_open(model)
    await asyncio.shield(asyncio.ensure_future(_unload_alone(model, body.lora_name)))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def _unload_alone(model: ServedModel, name: str) -> None:
    async with model.adapter_lock:
        if name not in model.adapters(model.owner):
            raise APIError(
                f"the LoRA adapter {name!r} is not loaded; GET /v1/models lists the loaded "
                "adapters",
                status=404,
                param="lora_name",
                code="model_not_found",
            )
        try:
            await _unload(model, name)
        except ConfigError as error:
            raise APIError(hide_paths(error), status=404, param="lora_name") from None
        except EasyDeLError as error:
            raise engine_unavailable(hide_paths(error)) from error


def _owners(model: ServedModel, owner: str | None) -> frozenset[str] | None:
    """Return the digests of the keys that may use an adapter, including administrators' keys.

    Args:
        owner: name or SHA-256 of the keys; None = every key.

    Raises:
        APIError: 400, the server has no such key.
    """
    if owner is None:
        return None
    keys = model.state.keys
    owners = {key.sha256 for key in keys if owner in (key.name, key.sha256)}
    if not owners:
        raise APIError(
            f"the owner {owner!r} is neither the name nor the sha256 of an API key of this "
            "server: use a key of its api_key_file, or omit owner",
            param="owner",
            code="invalid_value",
        )
    return frozenset(owners | {key.sha256 for key in keys if key.admin})


def _check_open(model: ServedModel) -> None:
    if not model.engine.config.max_loras:
        raise APIError(
            "this server does not support LoRA adapters: start the engine with max_loras, the "
            "maximum number of loaded adapters",
            status=404,
            code="adapters_off",
        )
    if model.adapter_directory is None:
        raise APIError(
            "clients of this server cannot load adapters: start the server with lora_directory, "
            "the directory of the adapters",
            status=403,
            code="adapters_off",
        )


ENDPOINTS = (
    post(
        "/v1/load_lora_adapter",
        "Load a LoRA adapter, if the server allows it.",
        _load_adapter,
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
        error_statuses=(*READING, 400, 403, 404, 503),
        method="POST",
        access="admin",
    ),
    Endpoint(
        "/sleep",
        "Release the device memory of the engine, if the server allows it.",
        sleep,
        Sleeping,
        error_statuses=(*READING, 400, 403, 404, 409, 503),
        method="POST",
        access="admin",
    ),
    Endpoint(
        "/wake_up",
        "Resume after /sleep.",
        wake_up,
        Sleeping,
        error_statuses=(*READING, 400, 403, 404, 409, 503),
        method="POST",
        access="admin",
    ),
    Endpoint(
        "/is_sleeping",
        "Return whether the engine sleeps.",
        is_sleeping,
        Sleeping,
        error_statuses=(*READING, 400, 403, 404),
    ),
)


def inside(directory: Path, client_path: str, kind: str, param: str) -> Path:
    """Return the resolved path of a directory inside a directory of the server.

    Args:
        directory: the directory of the server.
        client_path: the path of the client, relative to `directory`.
        kind: what the directory contains, for the errors.
        param: name of the field with the path.

    Raises:
        APIError: 403, the path or a link in it is outside; 404, the directory does not exist.
    """
    root = path = directory.resolve()
    try:
        path = (root / client_path).resolve()
        within = path.is_relative_to(root) and path != root
        there = within and path.is_dir()
        # The files may be links too.
        strays = there and any(
            not file.resolve().is_relative_to(root) for file in path.iterdir() if file.is_symlink()
        )
    except (OSError, ValueError, RuntimeError):  # too long, a zero byte, a loop of links
        within = there = strays = False
    if not within or strays:
        raise APIError(
            f"{client_path!r:.200} is not inside the {kind} directory of this server: send a path "
            "relative to this directory",
            status=403,
            param=param,
        )
    if not there:
        raise APIError(
            f"the {kind} directory {client_path!r:.200} does not exist", status=404, param=param
        )
    return path
