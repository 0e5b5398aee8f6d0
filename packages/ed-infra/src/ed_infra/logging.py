"""Loggers of this project. Importing sets nothing up; a program calls `setup` if it wants to."""

from __future__ import annotations

import logging
import sys

ROOT = "easydel"
_said: set[str] = set()
_process = 0

logging.getLogger(ROOT).addHandler(logging.NullHandler())


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module, below the project's own (`easydel.ed_infra.mesh`).

    In a run of several processes it passes one line for each event, not one for each process: what
    is less than an error is dropped everywhere but on process 0.
    """
    logger = logging.getLogger(name if name.startswith(ROOT) else f"{ROOT}.{name}")
    logger.addFilter(_speaks)
    return logger


def set_process(index: int) -> None:
    """Say which process this is; `ed_infra.distributed.initialize` does."""
    global _process
    _process = index


def _speaks(record: logging.LogRecord) -> bool:
    return _process == 0 or record.levelno >= logging.ERROR


def once(logger: logging.Logger, message: str, level: int = logging.WARNING) -> None:
    """Log a message the first time only, in this process."""
    if message not in _said:
        _said.add(message)
        logger.log(level, message)


def forget_said() -> None:
    """Let `once` repeat its messages; for tests."""
    _said.clear()


def setup(level: int | str = logging.INFO) -> None:
    """Print this project's messages on stderr. For programs; a library never calls it."""
    logger = logging.getLogger(ROOT)
    logger.setLevel(level)
    if not any(getattr(handler, "_easydel", False) for handler in logger.handlers):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname).1s %(name)s: %(message)s"))
        handler._easydel = True  # type: ignore[attr-defined]
        logger.addHandler(handler)
        logger.propagate = False
