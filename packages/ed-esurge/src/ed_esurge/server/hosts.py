"""A server over the devices of several processes: the first takes requests, the others follow."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ed_infra.errors import ConfigError

logger = logging.getLogger(__name__)

# Seconds in which the other processes must have heard of the end.
FAREWELL = 30


@contextmanager
def leading(engine: Any) -> Iterator[bool]:
    """Whether this process takes the requests of an engine.

    One that does not has followed the first to its end before the block begins. The first lets the
    others go after the block.

    Args:
        engine: what is served; several by their names.

    Raises:
        ConfigError: there are several engines, and one lies on devices of several processes.
    """
    engines = list(engine.values()) if isinstance(engine, Mapping) else [engine]
    bare = [getattr(one, "engine", one) for one in engines]  # without the thread around it
    roles = [getattr(one, "role", "alone") for one in bare]
    if set(roles) == {"alone"}:
        yield True
        return
    if len(engines) > 1:
        raise ConfigError(
            f"{len(engines)} models cannot be served together over several processes, which take "
            "the steps of one engine: serve one model, or start one process"
        )
    if roles == ["follows"]:
        with _ends_with_the_first():
            bare[0].follow()
        yield False
        return
    try:
        yield True
    finally:
        # In a thread: an engine that hangs in a step must not keep this process.
        farewell = threading.Thread(target=bare[0].terminate, daemon=True)
        farewell.start()
        farewell.join(FAREWELL)
        if farewell.is_alive():
            logger.error("the other processes could not be told to end: the engine hangs")


@contextmanager
def _ends_with_the_first() -> Iterator[None]:
    """Who stops a run signals all of its processes: the others go on until the first has drained.
    A second signal ends them at once."""

    def patient(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        logger.info("this process ends when the first one has; a second signal ends it now")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, patient) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
