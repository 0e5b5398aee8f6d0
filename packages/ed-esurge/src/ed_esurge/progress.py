"""A counter on one line of stderr; silent where that is no terminal."""

from __future__ import annotations

import sys
import time
from typing import Self


class Counter:
    """`label 3/8 (2.1 s)`, rewritten in place.

    Args:
        label: what is counted.
        quiet: show nothing.
    """

    def __init__(self, label: str, *, quiet: bool = False) -> None:
        self._label = label
        self._on = not quiet and sys.stderr.isatty()
        self._start = time.monotonic()

    def show(self, done: int, of: int) -> None:
        """Rewrite the line."""
        if self._on:
            seconds = time.monotonic() - self._start
            sys.stderr.write(f"\r\x1b[2K{self._label} {done}/{of} ({seconds:.1f} s)")
            sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._on:
            sys.stderr.write("\n")
