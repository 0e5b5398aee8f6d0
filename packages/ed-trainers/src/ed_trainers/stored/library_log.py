"""What orbax logs that nobody needs to read: warnings of what is meant, errors that we say."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ed_trainers.stored import disk

#: What orbax logs to.
LOGGER = logging.getLogger("absl")
#: Where tasks that orbax left behind end, when Python collects them: at any later time.
TASKS = logging.getLogger("asyncio")

# Of a directory of arrays without its step's metadata, and of reading the shapes alone.
_MEANT = ("Metadata file does not exist", "ts_context=None")


class Hush(logging.Filter):
    """Keeps those records off a logger."""

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
