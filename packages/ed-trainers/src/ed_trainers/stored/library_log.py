"""A filter for messages of orbax: expected warnings, and errors that this package reports
itself."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ed_trainers.stored import disk

#: Logger of orbax.
LOGGER = logging.getLogger("absl")
#: Logger of unfinished asyncio tasks, which Python destroys during garbage collection.
_TASKS = logging.getLogger("asyncio")

# Warnings about a directory of arrays without metadata of its step, and about reading only shapes.
_MEANT = ("Metadata file does not exist", "ts_context=None")
# After a failed write, orbax closes the event loop to which its other writes report their end.
_LATE = "Event loop is closed"


class Hush(logging.Filter):
    """Removes these records from a logger, and the ends of interrupted writes from stderr."""

    def __init__(self) -> None:
        super().__init__()
        self._broken = False
        self._hook: Callable[[sys.UnraisableHookArgs], object] | None = None

    def begin(self) -> None:
        """Start the filter before a call of orbax that writes."""
        LOGGER.addFilter(self)
        if self._hook is None:
            self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable

    def broke_off(self) -> None:
        """Keep the filter after a failed write, whose remaining tasks may end at any later time."""
        _TASKS.addFilter(self)
        self._broken = True

    def end(self) -> None:
        """Stop the filter, except for interrupted writes."""
        LOGGER.removeFilter(self)
        if self._hook and not self._broken and sys.unraisablehook == self._unraisable:
            self._hook, sys.unraisablehook = None, self._hook

    def _unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        assert self._hook is not None
        if unraisable.object is not None or str(unraisable.exc_value) != _LATE:
            self._hook(unraisable)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record passes the filter."""
        full = record.exc_info and disk.is_full(record.exc_info[1])
        return not full and not any(words in str(record.msg) for words in _MEANT)


@contextmanager
def hush_logger() -> Iterator[None]:
    """Remove these records from orbax's logger inside the block."""
    hush = Hush()
    LOGGER.addFilter(hush)
    try:
        yield
    finally:
        LOGGER.removeFilter(hush)
