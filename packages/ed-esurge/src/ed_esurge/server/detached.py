"""Answers that are generated without a connection, and the events that clients may read again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager

from ed_esurge.server.http.errors import APIError
from ed_esurge.server.http.json_parts import to_bytes

#: Limit of the stored events of one answer, in bytes.
MAX_EVENTS = 2**22


class DetachedAnswer:
    """An answer in progress.

    Attributes:
        task: the work; None after its end.
        events: the events so far; empty after they exceeded `MAX_EVENTS`.
        ended: whether no event follows.
        size, count: bytes and number of the events.
    """

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.events: list[bytes] = []
        self._cancelled = False
        self.size = self.count = 0
        self.ended = False
        self._changed = asyncio.Event()

    def append(self, event: str) -> None:
        """Store an event."""
        self.count += 1
        if self.size <= MAX_EVENTS:
            text = to_bytes(event)
            self.size += len(text)
            self.events.append(text)
        if self.size > MAX_EVENTS:
            self.events.clear()
        self._wake()

    @property
    def stored_bytes(self) -> int:
        """Bytes of the stored events."""
        return self.size if self.events else 0

    def end(self) -> None:
        """End the events."""
        self.ended, self.task = True, None
        self._wake()

    async def cancel(self) -> None:
        """Cancel the work and wait for its end."""
        task = self.task
        if task is not None and not task.done():
            if not self._cancelled:  # a second error could interrupt the last steps of the work
                self._cancelled = True
                await asyncio.sleep(0)  # a task that has not begun would not run its last steps
                task.cancel()
            await asyncio.wait([task])

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self, starting_after: int) -> AsyncGenerator[str]:
        """Yield the events with a number above `starting_after`, and wait for further events.

        Raises:
            APIError: 400, the events are not stored.
        """
        at = max(starting_after + 1, 0)
        while True:
            changed = self._changed
            if self.size > MAX_EVENTS:
                raise APIError(
                    f"the events of this response exceed {MAX_EVENTS} bytes and are not "
                    "stored: retrieve the response without stream",
                    code="events_not_stored",
                )
            if at < len(self.events):
                new = self.events[at:]
                at += len(new)
                yield b"".join(new).decode()
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
        self._places: Counter[str] = Counter()
        self._running: set[DetachedAnswer] = set()

    @contextmanager
    def claim(self, owner: str) -> Iterator[ExitStack]:
        """Take one of the places of a key for an answer that the block prepares.

        The place is free after the block, unless the block moves the yielded stack to `start`.

        Raises:
            APIError: 429, the key has too many unfinished answers.
        """
        count = self._places[owner]
        if count >= self._most:
            raise APIError(
                f"{count} background responses of this API key are unfinished, the limit of this "
                "server (max_background_responses): try again after one of them has ended",
                status=429,
                code="rate_limit_exceeded",
            )
        self._places[owner] += 1
        with ExitStack() as place:
            place.callback(self._leave, owner)
            yield place

    def _leave(self, owner: str) -> None:
        self._places[owner] -= 1
        if not self._places[owner]:
            del self._places[owner]

    def start(
        self, answer: DetachedAnswer, work: Callable[[], Awaitable[None]], place: ExitStack
    ) -> None:
        """Run the work of an answer in a task.

        Args:
            place: see `claim`; closed after the work.
        """

        async def run() -> None:
            try:
                await work()
            except asyncio.CancelledError:
                # A task that ends with this error would keep the frames of the work in memory.
                pass
            finally:
                place.close()
                answer.end()
                self._running.discard(answer)

        self._running.add(answer)
        answer.task = asyncio.create_task(run())

    async def close(self) -> None:
        """Cancel all unfinished answers."""
        await asyncio.sleep(0)  # see `DetachedAnswer.cancel`
        tasks = [answer.task for answer in self._running if answer.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
