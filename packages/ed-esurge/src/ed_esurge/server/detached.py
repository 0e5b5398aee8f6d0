"""Answers that are generated without a connection, and the events that clients may read again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

from ed_esurge.server.http.errors import APIError

#: Limit of the stored events of one answer, in characters.
MAX_EVENTS = 2**22


class DetachedAnswer:
    """An answer in progress.

    Attributes:
        task: the work.
        events: the events so far; empty after they exceeded `MAX_EVENTS`.
        ended: whether no event follows.
        size, count: characters and number of the events.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.task: asyncio.Task[None] | None = None
        self.events: list[str] = []
        self.size = self.count = 0
        self.ended = False
        self._changed = asyncio.Event()

    def append(self, event: str) -> None:
        """Store an event."""
        self.size += len(event)
        self.count += 1
        if self.size > MAX_EVENTS:
            self.events.clear()
        else:
            self.events.append(event)
        self._wake()

    def end(self) -> None:
        """End the events."""
        self.ended = True
        self._wake()

    async def cancel(self) -> None:
        """Cancel the work and wait for its end."""
        if self.task is not None and not self.task.done():
            self.task.cancel()
            await asyncio.wait([self.task])

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self, after: int) -> AsyncGenerator[str]:
        """Yield the events with a number above `after`, and wait for further events.

        Raises:
            APIError: 400, the events are not stored.
        """
        at = max(after + 1, 0)
        while True:
            changed = self._changed
            if self.size > MAX_EVENTS:
                raise APIError(
                    f"the events of this response exceed {MAX_EVENTS} characters and are not "
                    "stored: retrieve the response without stream",
                    code="events_not_stored",
                )
            if at < len(self.events):
                new = self.events[at:]
                at += len(new)
                yield "".join(new)
                continue
            if self.ended:
                return
            await changed.wait()


class DetachedAnswers:
    """The unfinished answers without a connection.

    Args:
        most: limit of the unfinished answers of one key.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._running: set[DetachedAnswer] = set()

    def check_room(self, owner: str) -> None:
        """Raise APIError: 429, the key has too many unfinished answers."""
        mine = sum(answer.owner == owner for answer in self._running)
        if mine >= self._most:
            raise APIError(
                f"{mine} background responses of this API key are unfinished, the limit of this "
                "server (max_background_responses): try again after one of them has ended",
                status=429,
                code="rate_limit_exceeded",
            )

    def start(self, answer: DetachedAnswer, work: Callable[[], Awaitable[None]]) -> None:
        """Run the work of an answer in a task."""

        async def run() -> None:
            try:
                await work()
            finally:
                answer.end()
                self._running.discard(answer)

        self._running.add(answer)
        answer.task = asyncio.create_task(run())

    async def close(self) -> None:
        """Cancel all unfinished answers."""
        tasks = [answer.task for answer in self._running if answer.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
