"""Compilation in a thread while the engine serves with other programs."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from ed_infra.errors import EasyDeLError
from ed_infra.logging import get_logger

logger = get_logger(__name__)

#: Number of threads that compile programs before the engine is ready. XLA releases the GIL while it
#: compiles; tracing does not benefit from threads.
COMPILERS = max(1, min(4, os.cpu_count() or 1))

#: Exit code of a process that Ctrl-C ends, as shells define it.
INTERRUPTED = 128 + signal.SIGINT

NameT = TypeVar("NameT")
Program = Callable[..., Any]


class BackgroundCompilation(Generic[NameT]):
    """Compiles programs in one thread, one after another, so that other processors serve requests.

    Args:
        names: the programs, in order.
        compile_one: compiles a program.
        context: creates the context of the whole compilation.
    """

    def __init__(
        self,
        names: Sequence[NameT],
        compile_one: Callable[[NameT], Program],
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._compile_one, self._context = compile_one, context
        self._pending = {name: Future[Program]() for name in names}
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="ed-esurge-compiler", daemon=True)
        atexit.register(self._stop_at_exit)  # XLA must not compile while the process ends
        self._thread.start()

    def __contains__(self, name: NameT) -> bool:
        """Whether a program is not compiled yet."""
        return name in self._pending

    def __len__(self) -> int:
        """Return the number of programs that are not compiled yet."""
        return len(self._pending)

    @property
    def here(self) -> bool:
        """Whether the caller runs in the background thread."""
        return threading.current_thread() is self._thread

    def take(self, name: NameT) -> Program | None:
        """Wait for a program. Return None if it is not among the programs, or was not compiled."""
        pending = self._pending.get(name)
        if pending is None or pending.exception() is not None:
            return None
        return pending.result()

    def stop(self, *, wait: bool = True) -> None:
        """Stop after the program in work. The remaining programs are not compiled.

        Args:
            wait: whether to wait for the program in work, which can last seconds.
        """
        self._stopped = True
        if wait:
            self._thread.join()

    def _stop_at_exit(self) -> None:
        """Wait for the program in work; a second Ctrl-C ends the process at once."""
        try:
            self.stop()
        except KeyboardInterrupt:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(INTERRUPTED)

    def _work(self) -> None:
        with self._context():
            for name, result in [*self._pending.items()]:
                try:
                    if self._stopped:
                        raise EasyDeLError("the compilation was stopped")
                    result.set_result(self._compile_one(name))
                except Exception as error:
                    result.set_exception(error)
                    if not self._stopped:
                        logger.warning("%s was not compiled in the background: %s", name, error)
                finally:
                    del self._pending[name]
        atexit.unregister(self._stop_at_exit)
