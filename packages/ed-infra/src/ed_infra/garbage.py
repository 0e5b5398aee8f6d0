"""Garbage collection around the start of a program.

Imports and models create many objects that stay. Collections visit these objects again and again,
stop all threads meanwhile, and find little.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Run the block without garbage collections. Later collections skip its objects (`settle`)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()
            gc.enable()


def settle() -> None:
    """Collect garbage once, and exclude the objects that remain from later collections."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
