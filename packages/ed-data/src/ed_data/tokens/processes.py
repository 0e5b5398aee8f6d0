"""A pool of worker processes for functions that are slow in Python, such as chat templates.

The worker processes are started, not forked, because this process may hold threads and devices. A
worker imports only the modules that the function needs, and ends when this process ends.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from ed_data.errors import DataError
from ed_data.tokens.worker import receive_message, send

A = TypeVar("A")
B = TypeVar("B")


class Workers(Generic[A, B]):
    """Worker processes that apply one function to items.

    Args:
        function: function of an item; function, items and results must be picklable.
        count: number of processes; each starts with its first item.
        key: option that sets the number, for messages.
    """

    def __init__(self, function: Callable[[A], B], count: int, key: str) -> None:
        self.count, self._function, self._key = count, function, key
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="ed-data-process")
        self._own = threading.local()
        self._all: list[subprocess.Popen[bytes]] = []

    def submit(self, item: A) -> Future[B]:
        """Return a future of the function's result, or of its error.

        The future raises a `DataError` if the worker process ended, or if a value cannot be
        pickled.
        """
        return self._pool.submit(self._call, item)

    def map(self, items: Iterable[A]) -> Iterator[B]:
        """Yield the results in the order of the items, a few of which are processed in advance."""
        ahead: deque[Future[B]] = deque()
        try:
            for item in items:
                ahead.append(self.submit(item))
                if len(ahead) > 2 * self.count:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()

    def close(self) -> None:
        """Stop all worker processes immediately."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._all:
            process.kill()
        self._pool.shutdown(wait=True)
        for process in self._all:
            process.communicate()

    def _call(self, item: A) -> B:
        process: subprocess.Popen[bytes] | None = getattr(self._own, "process", None)
        if process is None:
            process = self._own.process = self._start()
        ok, value = self._ask(process, item)
        if not ok:
            raise value
        return value

    def _start(self) -> subprocess.Popen[bytes]:
        path = [entry or os.getcwd() for entry in sys.path]
        process = subprocess.Popen(
            [sys.executable, "-m", "ed_data.tokens.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Threads of the tokenizer would compete with the other worker processes.
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path),
                "TOKENIZERS_PARALLELISM": "false",
            },
        )
        self._all.append(process)
        assert process.stdin is not None
        send(process.stdin, path)
        ok, value = self._ask(process, self._function)
        if not ok:
            raise self._not_sent(value)
        return process

    def _ask(self, process: subprocess.Popen[bytes], message: object) -> tuple[bool, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            send(process.stdin, message)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise self._not_sent(error) from error
        except OSError:
            pass  # the process has ended; reading the reply raises the error
        try:
            return receive_message(process.stdout)
        except (EOFError, OSError) as error:
            self._own.process = None
            raise DataError(
                f"{self._key}: a worker process ended with code {process.wait()}; a negative code "
                "is a signal, and -9 usually means insufficient memory: use fewer processes"
            ) from error

    def _not_sent(self, error: Exception) -> DataError:
        return DataError(
            f"{self._key}: an object cannot be sent to the worker processes "
            f"({type(error).__name__}: {error}); define its class in an importable module, or "
            "remove the option"
        )
