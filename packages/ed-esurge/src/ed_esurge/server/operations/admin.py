"""What administrators do with the memory of an engine, under vLLM's names.

`POST /sleep` and `/wake_up` lend the memory of the device to a trainer beside the server, and
`POST /reset_prefix_cache` forgets cached prefixes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from ed_infra.errors import ConfigError, EasyDeLError
from fastapi import Request
from fastapi.responses import JSONResponse, Response

from ed_esurge.server.generation.models import Served
from ed_esurge.server.generation.site import Site
from ed_esurge.server.http.auth import owner_of
from ed_esurge.server.http.errors import APIError, engine_unavailable

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


async def reset_prefix_cache(site: Site, request: Request) -> Response:
    """Forget the cached prefixes of the models, or of the one that the query names.

    Running requests are computed anew, and prefixes in host memory are forgotten too, whatever
    vLLM's `reset_running_requests` and `reset_external` say.

    Raises:
        APIError: 400, a parameter is not known; 404, there is no such model; 503, an engine does
            not run.
    """
    _check_query(request, ("model", "reset_running_requests", "reset_external"))
    for served in _models(site, request):
        await _done(served.engine.reset_prefix_cache())
    return Response()


def _asked(site: Site, request: Request, known: Sequence[str]) -> list[Served]:
    """The models that a request means."""
    if not site.state.enable_sleep_mode:
        raise APIError(
            "this server does not sleep for its clients: start it with enable_sleep_mode",
            status=403,
            code="sleep_off",
        )
    _check_query(request, known)
    return _models(site, request)


def _check_query(request: Request, known: Sequence[str]) -> None:
    for name in request.query_params:
        if name not in known:
            raise APIError(
                f"{name!r:.50} is not known here: {', '.join(known)}",
                param=name[:50],
                code="unknown_parameter",
            )


def _models(site: Site, request: Request) -> list[Served]:
    name = request.query_params.get("model")
    return [*site.models] if name is None else [site.find(name, owner_of(request.scope))]


async def _done(work: Awaitable[None]) -> None:
    try:
        await work
    except ConfigError as error:
        raise APIError(str(error), status=409) from None
    except EasyDeLError as error:
        raise engine_unavailable(str(error)) from error


def _state(models: Sequence[Served]) -> JSONResponse:
    return JSONResponse({"is_sleeping": all(served.engine.is_sleeping for served in models)})
