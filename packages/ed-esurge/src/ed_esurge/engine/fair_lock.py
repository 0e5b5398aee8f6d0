"""`FairLock`: a re-entrant lock that threads receive in the order in which they asked."""

from __future__ import annotations

import threading
from collections import deque


class FairLock:
    """A re-entrant lock. A thread that releases the lock cannot overtake the waiting threads."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self._waiting: deque[tuple[int, threading.Event]] = deque()

    def __enter__(self) -> FairLock:
        mine, turn = threading.get_ident(), threading.Event()
        with self._guard:
            if self._owner in (None, mine):
                self._owner = mine
                self._depth += 1
                return self
            self._waiting.append((mine, turn))
        turn.wait()
        return self

    def __exit__(self, *error: object) -> None:
        with self._guard:
            self._depth -= 1
            if self._depth:
                return
            self._owner = None
            if self._waiting:
                self._owner, turn = self._waiting.popleft()
                self._depth = 1
                turn.set()
