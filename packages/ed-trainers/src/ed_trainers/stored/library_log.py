"""Messages of orbax that nobody needs to read: warnings of what is meant, errors that we say."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ed_trainers.stored import disk

#: What orbax logs to.
LOGGER = logging.getLogger("absl")
#: Where tasks that orbax left behind end, when Python collects them.
TASKS = logging.getLogger("asyncio")

# Of a directory of arrays without its step's metadata, and of reading the shapes alone.
_MEANT = ("Metadata file does not exist", "ts_context=None")
# Where a write fails, orbax closes the event loop that its other writes report to when they end.
_LATE = "Event loop is closed"


class Hush(logging.Filter):
    """Keeps those records off a logger, and the ends of writes that were broken off off stderr."""

    def __init__(self) -> None:
        super().__init__()
        self._broken = False
        self._hook: Callable[[sys.UnraisableHookArgs], object] | None = None

    def begin(self) -> None:
        """Begin to keep them off; orbax is about to write."""
        LOGGER.addFilter(self)
        if self._hook is None:
            self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable

    def broke_off(self) -> None:
        """A write ended in an error: whatever it left behind ends at any later time."""
        TASKS.addFilter(self)
        self._broken = True

    def end(self) -> None:
        """Stop, but for the writes that were broken off."""
        LOGGER.removeFilter(self)
        if self._hook and not self._broken and sys.unraisablehook == self._unraisable:
            self._hook, sys.unraisablehook = None, self._hook

    def _unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        assert self._hook is not None
        if unraisable.object is not None or str(unraisable.exc_value) != _LATE:
            self._hook(unraisable)

    def filter(self, record: logging.LogRecord) -> bool:
        """Let a record pass that somebody is to read."""
        full = record.exc_info and disk.is_full(record.exc_info[1])
        return not full and not any(words in str(record.msg) for words in _MEANT)


@contextmanager
def hushed() -> Iterator[None]:
    """Keep those records off orbax's logger for a while."""
    hush = Hush()
    LOGGER.addFilter(hush)
    try:
        yield
    finally:
        LOGGER.removeFilter(hush)
