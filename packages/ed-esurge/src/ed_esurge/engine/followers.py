"""Delivery of outputs from a thread to the coroutines that wait for them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future

from ed_infra.logging import get_logger

from ed_esurge.outputs import RequestOutput

logger = get_logger(__name__)

OutputItem = RequestOutput | BaseException


class Follower:
    """Queue of the outputs of one request, in the event loop of the waiting coroutine."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._items: deque[OutputItem] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.over = False
        """Whether the last output or an error was read."""

    def put(self, item: OutputItem) -> None:
        """Append an output. Must be called in the event loop."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> RequestOutput:
        """Return the next delta. Deltas of several steps are merged if the reader is slower."""
        while not self._items:
            self._waiter = self.loop.create_future()
            await self._waiter
        item = self._items.popleft()
        if isinstance(item, RequestOutput):
            while self._items and isinstance(following := self._items[0], RequestOutput):
                item.add(following)
                self._items.popleft()
            self.over = item.finished
            return item
        self.over = True
        raise item


def hand_over(items: Iterable[tuple[Follower, OutputItem]]) -> None:
    """Pass outputs from the engine's thread to their followers.

    One call per event loop, because each call wakes the loop.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Follower, OutputItem]]] = {}
    for follower, item in items:
        by_loop.setdefault(follower.loop, []).append((follower, item))
    for loop, batch in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put, batch)
        except RuntimeError:
            logger.debug("the loop of a request has closed: its output is dropped")


def _put(batch: list[tuple[Follower, OutputItem]]) -> None:
    for follower, item in batch:
        follower.put(item)


def refuse(waiting: Follower | Future[None], error: BaseException) -> None:
    """Deliver an error."""
    if isinstance(waiting, Future):
        waiting.set_exception(error)
    else:
        hand_over([(waiting, error)])
