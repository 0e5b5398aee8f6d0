"""Work on request bodies beside the event loop, so that other clients are answered meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fastapi import Request

T = TypeVar("T")

#: Bytes of a body from which work on the body takes more than a few milliseconds.
LONG_BODY = 2**13
#: Where the scope of a request has the length of its body.
BODY_BYTES = "ed_esurge.body_bytes"
# Few threads: each waits for the interpreter lock like the event loop, whose delay grows with them.
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="ed-esurge-body")


def size_of(request: Request) -> int:
    """Return the length of a request's body."""
    return request.scope.get(BODY_BYTES, 0)


async def aside(work: Callable[[], T], size: int) -> T:
    """Return the result of work on `size` bytes: in a thread if there are many of them."""
    if size < LONG_BODY:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work)
