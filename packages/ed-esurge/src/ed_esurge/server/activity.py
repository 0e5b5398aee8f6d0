"""The use of a model: the number of its running requests, and when the model may be unloaded."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"[+-]?(?:\d+(?:\.\d*)?(?:ns|us|µs|ms|s|m|h))+|[+-]?\d+(?:\.\d*)?")
#: Longest finite duration in seconds, about 31 years.
MAX_SECONDS = 10**9
_PART = re.compile(r"(\d+(?:\.\d*)?)(ns|us|µs|ms|s|m|h)")


def parse_keep_alive(value: object) -> object:
    """Return a duration in seconds: a number, or Go's notation `1h30m`. Negative = infinity.

    Raises:
        ValueError: the text is no duration, or the duration is too long.
    """
    if isinstance(value, str):
        text = value.strip()
        if len(text) > 64 or not _DURATION.fullmatch(text):
            raise ValueError(f"{value!r:.80} is no duration: send seconds, or text such as 5m")
        parts = _PART.findall(text)
        amount = sum(float(number) * _UNITS[unit] for number, unit in parts)
        value = amount if parts else abs(float(text))
        value = -value if text.startswith("-") else value
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value > MAX_SECONDS:
            raise ValueError(
                f"the duration is longer than {MAX_SECONDS} seconds: send -1 to keep the model "
                "loaded"
            )
        return math.inf if value < 0 else float(value)
    return value


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
