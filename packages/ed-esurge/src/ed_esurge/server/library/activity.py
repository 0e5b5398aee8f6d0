"""The use of a model: the number of its running requests, and when the model may be unloaded."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Activity:
    """The running requests of a model, and how long the model stays loaded without requests.

    Args:
        keep_alive: seconds after the last request; infinity = the model is never unloaded.
        changed: called when the model may have to be unloaded earlier or later.
    """

    def __init__(
        self, keep_alive: float = math.inf, changed: Callable[[], object] = lambda: None
    ) -> None:
        self.running = 0
        self.last_used = time.monotonic()
        self._keep_alive, self._changed = keep_alive, changed

    @contextmanager
    def using(self) -> Iterator[None]:
        """Count a request during the block."""
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self.last_used = time.monotonic()
            self._changed()

    def keep(self, seconds: float) -> None:
        """Set how long the model stays loaded after its requests, from the next end of a request.

        Args:
            seconds: infinity = forever, 0 = the model is unloaded after the running requests.
        """
        self._keep_alive = seconds
        self._changed()

    @property
    def expires_in(self) -> float:
        """Seconds until the model is unloaded if no request follows; 0 = now."""
        if self.running:
            return self._keep_alive
        return max(0.0, self.last_used + self._keep_alive - time.monotonic())
