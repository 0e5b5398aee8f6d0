"""What orchestrators and monitors ask.

`live` fails when only a restart helps: the engine's thread is dead, or stuck in a step. `ready` and
`/health` fail then too, and while the server drains. `decode` fails where the model gives no token.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from contextlib import aclosing

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from ed_esurge.sampling import SamplingParams
from ed_esurge.server.errors import APIError
from ed_esurge.server.served import Served, new_id

# Seconds in which a token must come.
DECODE_SECONDS = 30.0


def server_version() -> str:
    """The version of this package."""
    return importlib.metadata.version("ed-esurge")


def _down(reason: str, status: str = "down") -> JSONResponse:
    return JSONResponse({"status": status, "reason": reason}, 503)


async def live(served: Served, request: Request) -> JSONResponse:
    """Whether the engine runs."""
    if not served.engine.is_healthy:
        return _down("the engine is not running")
    return JSONResponse({"status": "ok"})


async def ready(served: Served, request: Request) -> JSONResponse:
    """Whether requests are taken."""
    if served.engine.is_healthy and served.draining:
        return _down("the server is stopping", "draining")
    return await live(served, request)


async def decode(served: Served, request: Request) -> JSONResponse:
    """Whether a real token comes by the way that requests take. Those who ask at the same time
    share one."""
    if served.decoding is None or served.decoding.done():
        served.decoding = asyncio.create_task(_decode(served))
    reason = await asyncio.shield(served.decoding)
    return JSONResponse({"status": "ok"}) if reason is None else _down(reason)


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


async def metrics(served: Served, request: Request) -> Response:
    """The text that Prometheus scrapes."""
    return Response(served.metrics.render(), media_type=CONTENT_TYPE_LATEST)


async def version(served: Served, request: Request) -> JSONResponse:
    """The version of the server."""
    return JSONResponse({"version": server_version()})
