"""`POST /sleep`, `POST /wake_up` and `GET /is_sleeping`, which vLLM has for developers: who trains
beside the server gets the memory of the device for a while."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from ed_infra.errors import ConfigError, EasyDeLError
from fastapi import Request
from fastapi.responses import JSONResponse

from ed_esurge.server.errors import APIError, engine_unavailable
from ed_esurge.server.served import Served
from ed_esurge.server.site import Site

LEVELS = {"1": 1, "2": 2}


async def sleep(site: Site, request: Request) -> JSONResponse:
    """Give the memory of the device to others; `level` and `model` are of the query.

    Raises:
        APIError: 400, `level` is neither 1 nor 2; 403, the server does not do that; 404, there is
            no such model; 409, the engine cannot sleep so; 503, it does not run.
    """
    models = _asked(site, request, ("level", "model"))
    level = LEVELS.get(request.query_params.get("level", "1"))
    if level is None:
        raise APIError(
            "level is 1, which keeps the weights in host memory, or 2, which forgets them",
            param="level",
            code="invalid_value",
        )
    for served in models:
        await _done(served.engine.sleep(level))
    return _state(models)


async def wake_up(site: Site, request: Request) -> JSONResponse:
    """Go on after `sleep`; `model` is of the query.

    Raises:
        APIError: as `sleep`; 409, the weights were forgotten.
    """
    models = _asked(site, request, ("model",))
    for served in models:
        await _done(served.engine.wake_up())
    return _state(models)


async def is_sleeping(site: Site, request: Request) -> JSONResponse:
    """Whether the models sleep, or the one that the query names. Raises APIError: as `sleep`."""
    return _state(_asked(site, request, ("model",)))


def _asked(site: Site, request: Request, known: Sequence[str]) -> list[Served]:
    """The models that a request means."""
    if not site.state.enable_sleep_mode:
        raise APIError(
            "this server does not sleep for its clients: start it with enable_sleep_mode",
            status=403,
            code="sleep_off",
        )
    for name in request.query_params:
        if name not in known:
            raise APIError(
                f"{name!r:.50} is not known here: {', '.join(known)}",
                param=name[:50],
                code="unknown_parameter",
            )
    name = request.query_params.get("model")
    return [*site.models] if name is None else [site.find(name)]


async def _done(work: Awaitable[None]) -> None:
    try:
        await work
    except ConfigError as error:
        raise APIError(str(error), status=409) from None
    except EasyDeLError as error:
        raise engine_unavailable(str(error)) from error


def _state(models: Sequence[Served]) -> JSONResponse:
    return JSONResponse({"is_sleeping": all(served.engine.is_sleeping for served in models)})
