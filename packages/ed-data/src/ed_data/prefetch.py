"""Batches made ahead of time by threads; which thread made one never shows in it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Call `make(step)` for the steps after the one that was asked for.

    Args:
        make: a pure function of the step, safe to call from several threads.
        workers: threads; 0 makes each step when it is asked for.
        depth: steps made ahead.
    """

    def __init__(self, make: Callable[[int], T], workers: int, depth: int) -> None:
        self._make = make
        self._workers, self._depth = workers, depth
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: dict[int, Future[T]] = {}
        self._lock = threading.Lock()

    def get(self, step: int, last: int | None = None) -> T:
        """Return `make(step)` and start on the steps after it, up to (not including) `last`."""
        if self._workers == 0 or self._depth == 0:
            return self._make(step)
        with self._lock:
            ready = self._ahead.pop(step, None)
            wanted = range(step + 1, step + 1 + self._depth)
            for other in [s for s in self._ahead if s not in wanted]:
                self._ahead.pop(other).cancel()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="ed-data")
            for following in wanted:
                if following not in self._ahead and (last is None or following < last):
                    self._ahead[following] = self._pool.submit(self._make, following)
        return self._make(step) if ready is None else ready.result()

    def close(self) -> None:
        """Stop the threads; what they are doing is finished and forgotten."""
        with self._lock:
            for future in self._ahead.values():
                future.cancel()
            self._ahead.clear()
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
