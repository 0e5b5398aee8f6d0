"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, with vLLM's bodies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ed_infra.errors import CheckpointError, ConfigError, EasyDeLError
from fastapi import Request
from fastapi.responses import PlainTextResponse
from pydantic import Field

from ed_esurge.server.generation.models import Served
from ed_esurge.server.http.errors import APIError, engine_unavailable
from ed_esurge.server.http.fields import Body

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


async def load(served: Served, body: LoadAdapterRequest, request: Request) -> PlainTextResponse:
    """Serve an adapter under a name.

    Raises:
        APIError: 400, the adapter cannot be loaded, or no key belongs to its owner; 403, it lies
            outside the server's directory; 404, it is not there.
    """
    _check_open(served)
    owners = _owners(served, body.owner)
    path = _inside(served.adapter_directory, body.lora_path)
    if body.lora_name in served.names:
        raise APIError(
            f"{body.lora_name!r} is the model itself: choose another name", param="lora_name"
        )
    loaded = body.lora_name in served.adapters(served.owner)
    if loaded and not body.load_inplace:
        raise APIError(
            f"the LoRA adapter {body.lora_name!r} has already been loaded: unload it, or send "
            "load_inplace: true",
            param="lora_name",
        )
    try:
        if loaded:
            await served.engine.unload_lora_adapter(body.lora_name)
        if owners is None:
            served.adapter_owners.pop(body.lora_name, None)
        else:  # before it is there: nobody else must see it meanwhile
            served.adapter_owners[body.lora_name] = owners
        await served.engine.load_lora_adapter(body.lora_name, path)
    except (ConfigError, CheckpointError) as error:
        raise APIError(str(error).replace(str(path), body.lora_path), param="lora_path") from None
    except EasyDeLError as error:
        raise engine_unavailable(str(error)) from error
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload(served: Served, body: UnloadAdapterRequest, request: Request) -> PlainTextResponse:
    """Let no new request use an adapter; those that use it end as they would.

    Raises:
        APIError: 404, there is none of that name.
    """
    _check_open(served)
    if body.lora_name not in served.adapters(served.owner):
        raise APIError(
            f"the LoRA adapter {body.lora_name!r} is not loaded; GET /v1/models lists those that "
            "are",
            status=404,
            param="lora_name",
            code="model_not_found",
        )
    try:
        await served.engine.unload_lora_adapter(body.lora_name)
    except ConfigError as error:  # somebody else was quicker
        raise APIError(str(error), status=404, param="lora_name") from None
    except EasyDeLError as error:
        raise engine_unavailable(str(error)) from error
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _owners(served: Served, wanted: str | None) -> frozenset[str] | None:
    """Return the digests of the keys that may use an adapter, administrators' keys included.

    Args:
        wanted: name or SHA-256 of the keys. None: every key.

    Raises:
        APIError: 400, the server has no such key.
    """
    if wanted is None:
        return None
    keys = served.state.keys
    owners = {key.sha256 for key in keys if wanted in (key.name, key.sha256)}
    if not owners:
        raise APIError(
            f"the owner {wanted!r} is neither the name nor the sha256 of an API key of this "
            "server: name a key of its api_key_file, or leave owner out",
            param="owner",
            code="invalid_value",
        )
    return frozenset(owners | {key.sha256 for key in keys if key.admin})


def _check_open(served: Served) -> None:
    if not served.engine.config.max_loras:
        raise APIError(
            "this server serves no LoRA adapters: start the engine with max_loras, how many can be "
            "loaded at the same time",
            status=404,
            code="adapters_off",
        )
    if served.adapter_directory is None:
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
