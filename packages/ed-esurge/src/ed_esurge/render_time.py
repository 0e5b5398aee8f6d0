"""A limit of the processor time of chat templates that are rendered in this process.

The template of a checkpoint is a program: two nested loops over `range(99999)` never end. A thread
looks at the processor times of the threads that render, and raises an exception in a thread above
its limit.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

#: Processor time of a conversation in seconds, and time of each character of its texts.
CPU_SECONDS, CPU_PER_CHARACTER = 5.0, 1e-6
#: Seconds between two looks at the running templates.
_PERIOD = 0.1


class TemplateTimeError(Exception):
    """A template needs more processor time than its limit."""

    def __init__(self) -> None:
        super().__init__(
            f"the template needs more than {CPU_SECONDS:g} s of processor time: use another "
            "template (chat_template=), or send fewer messages"
        )


@dataclass(eq=False)
class _Rendering:
    """A thread that renders, the end of its processor time, and whether it was interrupted."""

    thread: int
    end: float
    interrupted: bool = False


class RenderTimer:
    """Interrupts templates that need too much processor time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: set[_Rendering] = set()
        self._thread: threading.Thread | None = None

    @contextmanager
    def limit(self, characters: int) -> Iterator[None]:
        """Limit the processor time of the block.

        Args:
            characters: length of the texts of the conversation.

        Raises:
            TemplateTimeError: the limit was exceeded. The exception can also be raised in the
                middle of the block, again and again until the block ends.
        """
        seconds = CPU_SECONDS + CPU_PER_CHARACTER * characters
        thread = threading.get_ident()
        entry = _Rendering(thread, _read_time(thread) + seconds)
        with self._changed:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._watch, name="templates", daemon=True)
                self._thread.start()
            self._running.add(entry)
            self._changed.notify()
        try:
            yield
        finally:
            self._end(entry)

    def _end(self, entry: _Rendering) -> None:
        while True:  # an exception of the timer can interrupt this method as well
            try:
                with self._changed:
                    self._running.discard(entry)
                if entry.interrupted:
                    # No exception follows. One that waits is raised at the next jump.
                    for _ in range(1000):
                        pass
                break
            except TemplateTimeError:
                continue
        if entry.interrupted:
            raise TemplateTimeError

    def _watch(self) -> None:
        while True:
            with self._changed:
                while not self._running:
                    self._changed.wait()
                for entry in self._running:
                    if _read_time(entry.thread) > entry.end:
                        entry.interrupted = True
                        _raise_in(entry.thread)
            time.sleep(_PERIOD)


def _read_time(thread: int) -> float:
    """Return the processor time of a thread; the elapsed time on systems without such a clock."""
    if hasattr(time, "pthread_getcpuclockid"):
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    return time.monotonic()


def _raise_in(thread: int) -> None:
    error = ctypes.py_object(TemplateTimeError)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)


RENDER_TIMER = RenderTimer()
