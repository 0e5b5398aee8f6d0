"""Loggers of this project. An import configures nothing; programs may call `setup`."""

from __future__ import annotations

import logging
import sys

ROOT = "easydel"
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


def setup(level: int | str = logging.INFO) -> None:
    """Print this project's messages to stderr. Programs call this function, libraries do not."""
    logger = logging.getLogger(ROOT)
    logger.setLevel(level)
    if not any(getattr(handler, "_easydel", False) for handler in logger.handlers):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname).1s %(name)s: %(message)s"))
        handler._easydel = True  # type: ignore[attr-defined]
        logger.addHandler(handler)
        logger.propagate = False
