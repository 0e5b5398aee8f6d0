"""What orchestrators and monitors ask.

`live` fails when only a restart helps: the engine's thread is dead, or stuck in a step. `ready` and
`/health` fail then too, while the server drains, and while a model sleeps. `decode` fails where the
model gives no token.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from contextlib import aclosing

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from ed_esurge.sampling import SamplingParams
from ed_esurge.server.generation.models import Served, new_id
from ed_esurge.server.generation.site import Site
from ed_esurge.server.http.errors import APIError

# Seconds in which a token must come.
DECODE_SECONDS = 30.0


def server_version() -> str:
    """The version of this package."""
    return importlib.metadata.version("ed-esurge")


def _down(reason: str, status: str = "down") -> JSONResponse:
    return JSONResponse({"status": status, "reason": reason}, 503)


async def live(site: Site, request: Request) -> JSONResponse:
    """Whether every engine runs."""
    if not _healthy(site):
        return _down("the engine is not running")
    return JSONResponse({"status": "ok"})


async def ready(site: Site, request: Request) -> JSONResponse:
    """Whether requests are taken."""
    if _healthy(site) and site.state.draining:
        return _down("the server is stopping", "draining")
    if _healthy(site) and any(served.engine.is_sleeping for served in site.models):
        return _down("a model sleeps: POST /wake_up", "sleeping")
    if _healthy(site) and site.batch_trouble is not None:
        return JSONResponse({"status": "ok", "degraded": {"batches": site.batch_trouble}})
    return await live(site, request)


def _healthy(site: Site) -> bool:
    return all(served.engine.is_healthy for served in site.models)


async def decode(site: Site, request: Request) -> JSONResponse:
    """Whether every model gives a real token by the way that requests take. Those who ask at the
    same time share one."""
    for served in site.models:
        if served.decoding is None or served.decoding.done():
            served.decoding = asyncio.create_task(_decode(served))
    tasks = [served.decoding for served in site.models if served.decoding is not None]
    reasons = await asyncio.gather(*map(asyncio.shield, tasks))
    wrong = next((reason for reason in reasons if reason is not None), None)
    return JSONResponse({"status": "ok"}) if wrong is None else _down(wrong)


async def _decode(served: Served) -> str | None:
    """What is wrong; None: nothing."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    try:
        async with asyncio.timeout(DECODE_SECONDS):
            deltas = served.generate([0], params, new_id("health", None))
            async with aclosing(deltas) as items:
                tokens = [token async for one in items for token in one.outputs[0].token_ids]
        return None if tokens else "no token came"
    except TimeoutError:
        return f"no token came within {DECODE_SECONDS:g} seconds"
    except APIError as error:
        return error.message


async def metrics(site: Site, request: Request) -> Response:
    """The text that Prometheus scrapes."""
    return Response(site.metrics.render(), media_type=CONTENT_TYPE_LATEST)


async def ping(site: Site, request: Request) -> Response:
    """Whether requests are taken, by the status alone."""
    return Response(status_code=(await ready(site, request)).status_code)


async def load(site: Site, request: Request) -> JSONResponse:
    """The number of requests that wait or run."""
    numbers = [stats for served in site.models for stats in served.engine.replica_stats()]
    names = ("num_requests_running", "num_requests_waiting")
    return JSONResponse({"server_load": int(sum(one[name] for one in numbers for name in names))})


async def version(site: Site, request: Request) -> JSONResponse:
    """The version of the server."""
    return JSONResponse({"version": server_version()})
