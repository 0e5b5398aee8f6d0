"""Slots of the lines of all batches, which the owners share equally."""

from __future__ import annotations

import asyncio
from collections import Counter, deque


class LineSlots:
    """Slots of running lines. A free slot goes to the waiting owner with the fewest running lines.

    Args:
        count: number of lines that run concurrently.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._running: Counter[str] = Counter()
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()

    async def acquire(self, owner: str) -> None:
        """Wait for a slot."""
        if self._free:
            self._take(owner)
            return
        slot = asyncio.get_running_loop().create_future()
        self._waiting.append((owner, slot))
        try:
            await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled():
                self.release(owner)
            else:
                self._waiting.remove((owner, slot))
            raise

    def release(self, owner: str) -> None:
        """Return a slot."""
        self._free += 1
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        if self._waiting:
            place = min(self._waiting, key=lambda entry: self._running[entry[0]])
            self._waiting.remove(place)
            self._take(place[0])
            place[1].set_result(None)

    def _take(self, owner: str) -> None:
        self._free -= 1
        self._running[owner] += 1
