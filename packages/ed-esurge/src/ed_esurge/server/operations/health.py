"""Endpoints for orchestrators and monitors.

`live` fails if the server needs a restart, because the engine's thread is dead or stuck in a step.
`_ready` and `/health` also fail while the server drains and while a model sleeps. `_check_decoding`
fails if the model does not generate a token (a model that generates no tokens: a vector; a model
for speech: a transcript).
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from contextlib import aclosing
from functools import partial

from ed_infra.errors import EasyDeLError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ed_esurge.engine.intake import CheckedPrompt
from ed_esurge.sampling import PoolingParams, SamplingParams
from ed_esurge.server.generation.abilities import ROUTES_OF_ENCODERS, SPEECH_TASKS
from ed_esurge.server.generation.answers import HealthState, Load, Version
from ed_esurge.server.generation.models import ServedModel, new_id
from ed_esurge.server.generation.served_models import ServedModels
from ed_esurge.server.generation.speech import speech_engine
from ed_esurge.server.http.errors import APIError, hide_paths
from ed_esurge.server.routing import Endpoint

# Time limit for the token of the decode check.
DECODE_SECONDS = 30.0


def server_version() -> str:
    """Return the version of this package."""
    return importlib.metadata.version("ed-esurge")


def _down(reason: str, status: str = "down") -> JSONResponse:
    return JSONResponse({"status": status, "reason": reason}, 503)


async def live(server: ServedModels, request: Request) -> JSONResponse:
    """Return whether every engine runs."""
    if not _healthy(server):
        return _down("the engine is not running")
    return JSONResponse({"status": "ok"})


async def _ready(server: ServedModels, request: Request) -> JSONResponse:
    """Return whether the server accepts requests."""
    if _healthy(server) and server.state.draining:
        return _down("the server is stopping", "draining")
    if _healthy(server) and any(model.engine.is_sleeping for model in server.models):
        return _down("a model sleeps: POST /wake_up", "sleeping")
    if _healthy(server) and server.batch_trouble is not None:
        return JSONResponse({"status": "ok", "degraded": {"batches": server.batch_trouble}})
    numbers = [stats for model in server.models for stats in model.engine.replica_stats()]
    pending = int(sum(stats.get("programs_pending", 0) for stats in numbers))
    if _healthy(server) and pending:
        return JSONResponse({"status": "ok", "programs_pending": pending})
    return await live(server, request)


def _healthy(server: ServedModels) -> bool:
    return all(model.engine.is_healthy for model in server.models)


async def _check_decoding(server: ServedModels, request: Request) -> JSONResponse:
    """Return whether every model generates a token, or a vector if it generates no tokens.

    Concurrent checks share one request.
    """
    for model in server.models:
        if model.decoding is None or model.decoding.done():
            model.decoding = asyncio.create_task(_decode(model))
    tasks = [model.decoding for model in server.models if model.decoding is not None]
    reasons = await asyncio.gather(*map(asyncio.shield, tasks))
    wrong = next((reason for reason in reasons if reason is not None), None)
    return JSONResponse({"status": "ok"}) if wrong is None else _down(wrong)


async def _decode(model: ServedModel) -> str | None:
    """Return the reason of a failed check; None = success."""
    prompt = CheckedPrompt([0], 1)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    try:
        async with asyncio.timeout(DECODE_SECONDS):
            if model.task in SPEECH_TASKS:
                await speech_engine(model).check()
                return None
            if model.task in ROUTES_OF_ENCODERS:
                await model.vectors([prompt], PoolingParams())
                return None
            deltas = model.generate(prompt, params, new_id("health", None))
            async with aclosing(deltas) as items:
                tokens = [token async for one in items for token in one.outputs[0].token_ids]
        return None if tokens else "the model generated no token"
    except TimeoutError:
        return f"the model generated no token within {DECODE_SECONDS:g} seconds"
    except APIError as error:
        return error.message
    except (EasyDeLError, RuntimeError) as error:
        return hide_paths(error)


async def metrics(server: ServedModels, request: Request) -> Response:
    """Return the text for Prometheus."""
    return Response(server.metrics.render(), media_type=CONTENT_TYPE_LATEST)


async def ping(server: ServedModels, request: Request) -> Response:
    """Return the status of `_ready` without a body."""
    return Response(status_code=(await _ready(server, request)).status_code)


async def _load(server: ServedModels, request: Request) -> JSONResponse:
    """Return the number of waiting and running requests."""
    numbers = [stats for model in server.models for stats in model.engine.replica_stats()]
    names = ("num_requests_running", "num_requests_waiting")
    return JSONResponse({"server_load": int(sum(one[name] for one in numbers for name in names))})


async def _version(server: ServedModels, request: Request) -> JSONResponse:
    """Return the version of the server."""
    return JSONResponse({"version": server_version()})


_probe = partial(Endpoint, error_statuses=(421, 503), access="open")
_figures = partial(Endpoint, error_statuses=(421,), access="open")
ENDPOINTS = (
    *(
        _probe(path, "Return whether the server accepts requests.", _ready, HealthState)
        for path in ("/health", "/health/ready")
    ),
    _probe(
        "/health/live",
        "Return whether the engine runs. If not, restart the server.",
        live,
        HealthState,
    ),
    _probe(
        "/health/decode",
        "Return whether the model generates a token.",
        _check_decoding,
        HealthState,
    ),
    *(
        _probe(
            "/ping",
            "Return whether the server accepts requests. The body is empty.",
            ping,
            "text/plain",
            method=method,
        )
        for method in ("GET", "POST")
    ),
    _figures("/load", "Return the number of waiting and running requests.", _load, Load),
    _figures("/metrics", "Return Prometheus metrics.", metrics, "text/plain"),
    _figures("/version", "Return the version of the server.", _version, Version),
)
