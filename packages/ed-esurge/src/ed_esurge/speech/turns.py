"""Fair order of transcriptions: clients take turns, so a long recording delays no other client.

Both classes serve the clients round robin: the oldest entry of the client that was served least
recently is next.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from ed_esurge.speech.samples import QueueFullError

T = TypeVar("T")


class RoundRobin(Generic[T]):
    """A queue of entries of several clients."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, deque[T]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    def count(self, client: str) -> int:
        """Return the number of waiting entries of a client."""
        return len(self._entries.get(client, ()))

    def push(self, client: str, entry: T) -> None:
        """Append an entry."""
        self._entries.setdefault(client, deque()).append(entry)

    def discard(self, client: str, entry: T) -> None:
        """Remove an entry if it waits."""
        client_entries = self._entries.get(client)
        if client_entries is not None and entry in client_entries:
            client_entries.remove(entry)
            if not client_entries:
                del self._entries[client]

    def pop(self, allowed: Callable[[str], bool] = lambda client: True) -> tuple[str, T] | None:
        """Remove and return the next entry of the allowed clients; None = there is none."""
        client = next((name for name in self._entries if allowed(name)), None)
        if client is None:
            return None
        client_entries = self._entries[client]
        entry = client_entries.popleft()
        if client_entries:
            self._entries.move_to_end(client)
        else:
            del self._entries[client]
        return client, entry


class DeviceTurns:
    """The turns of threads that share one device. A thread computes only during its turn."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy = False
        self._waiting: RoundRobin[threading.Event] = RoundRobin()

    @contextmanager
    def turn(self, client: str) -> Iterator[None]:
        """Compute during the block, after earlier turns of other clients."""
        self._take(client)
        try:
            yield
        finally:
            self._pass_on()

    def yield_turn(self, client: str) -> None:
        """Let the other threads that wait compute first. The caller has the turn."""
        with self._lock:
            if not len(self._waiting):
                return
        self._pass_on()
        self._take(client)

    def _take(self, client: str) -> None:
        mine = threading.Event()
        with self._lock:
            if not self._busy:
                self._busy = True
                return
            self._waiting.push(client, mine)
        mine.wait()

    def _pass_on(self) -> None:
        with self._lock:
            next_entry = self._waiting.pop()
            if next_entry is None:
                self._busy = False
            else:
                next_entry[1].set()


class TurnPlaces:
    """The places of running transcriptions. One client uses at most half of them.

    Not thread-safe: all calls belong to one event loop.

    Args:
        count: number of places.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.running: Counter[str] = Counter()
        self._waiting: RoundRobin[asyncio.Future[None]] = RoundRobin()

    @property
    def num_running(self) -> int:
        """Number of transcriptions that have a place."""
        return sum(self.running.values())

    @property
    def num_waiting(self) -> int:
        """Number of transcriptions that wait for a place."""
        return len(self._waiting)

    async def enter(self, client: str, most: int) -> None:
        """Wait for a place. The caller calls `leave` when the work has ended.

        Args:
            client: name of the client.
            most: maximum number of running and waiting transcriptions. A client with another
                transcription may use half.

        Raises:
            QueueFullError: there are too many.
        """
        client_count = self.running.get(client, 0) + self._waiting.count(client)
        if self.num_running + self.num_waiting >= most or (
            client_count and client_count >= max(most // 2, 1)
        ):
            raise QueueFullError(
                f"{self.num_running} transcriptions run and {self.num_waiting} wait; the limit is "
                f"{most} (max_concurrent_transcriptions; half of that for one client): try again "
                "later"
            )
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.push(client, future)
        self._fill()
        try:
            await future
        except asyncio.CancelledError:
            self._waiting.discard(client, future)
            if future.done() and not future.cancelled():
                self.leave(client)
            raise

    def leave(self, client: str) -> None:
        """Give a place back."""
        self.running[client] -= 1
        if not self.running[client]:
            del self.running[client]
        self._fill()

    def _fill(self) -> None:
        share = max(self.count // 2, 1)
        while self.num_running < self.count:
            next_entry = self._waiting.pop(lambda client: self.running.get(client, 0) < share)
            if next_entry is None:
                return
            client, future = next_entry
            if not future.cancelled():
                self.running[client] += 1
                future.set_result(None)
