"""Loggers of this project. An import configures nothing; programs may call `setup`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

ROOT = "easydel"
#: Every logger whose children are the loggers of this project's modules.
LOGGERS = (ROOT, "ed_data", "ed_esurge", "ed_elarge")
_PLAIN = "%(message)s"
_said: set[str] = set()
_process = 0

logging.getLogger(ROOT).addHandler(logging.NullHandler())


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module, a child of the project's logger (`easydel.ed_infra.mesh`).

    In a run of several processes, only process 0 logs messages below the level of errors.
    """
    logger = logging.getLogger(name if name.startswith(ROOT) else f"{ROOT}.{name}")
    logger.addFilter(_speaks)
    return logger


def set_process(index: int) -> None:
    """Set the number of this process; `ed_infra.distributed.initialize` calls this function."""
    global _process
    _process = index


def _speaks(record: logging.LogRecord) -> bool:
    return _process == 0 or record.levelno >= logging.ERROR


def once(logger: logging.Logger, message: str, level: int = logging.WARNING) -> None:
    """Log a message once per process."""
    if message not in _said:
        _said.add(message)
        logger.log(level, message)


def forget_said() -> None:
    """Allow `once` to repeat messages; for tests."""
    _said.clear()


def show_messages(level: int = logging.WARNING) -> None:
    """Print the messages of this project from `level`, and warnings of other libraries, to stderr.

    Commands call this function before their work. A program that configured logging keeps its
    handlers.
    """
    logging.basicConfig(level=logging.WARNING, format=_PLAIN)
    if level < logging.WARNING:
        for name in LOGGERS:
            logging.getLogger(name).setLevel(level)


@contextmanager
def show_times() -> Iterator[None]:
    """Print the times of messages during the block, if `show_messages` prints them."""
    handlers = [
        handler
        for handler in logging.getLogger().handlers
        if handler.formatter is not None and handler.formatter._fmt == _PLAIN
    ]
    for handler in handlers:
        handler.setFormatter(logging.Formatter(f"%(asctime)s {_PLAIN}"))
    try:
        yield
    finally:
        for handler in handlers:
            handler.setFormatter(logging.Formatter(_PLAIN))


def setup(level: int | str = logging.INFO) -> None:
    """Print this project's messages to stderr. Programs call this function, libraries do not."""
    logger = logging.getLogger(ROOT)
    logger.setLevel(level)
    if not any(handler.name == ROOT for handler in logger.handlers):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname).1s %(name)s: %(message)s"))
        handler.name = ROOT
        logger.addHandler(handler)
        logger.propagate = False
