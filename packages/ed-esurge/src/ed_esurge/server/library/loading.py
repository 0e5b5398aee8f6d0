"""How a server loads the models of a directory, and how the server frees their memory."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ed_esurge.server.library.checkpoint_files import CheckpointFiles


@dataclass(frozen=True)
class ModelLoading:
    """Options of a directory of models.

    Attributes:
        folder: see `ModelDirectory`.
        load: creates the engine of a checkpoint; called in a thread.
        estimate: see `ModelDirectory`.
        memory: see `ModelDirectory`.
        keep_alive: see `ModelDirectory`.
        max_model_len: see `ModelDirectory`.
    """

    folder: Path
    load: Callable[[Path], Any]
    estimate: Callable[[CheckpointFiles], int]
    memory: int | None = None
    keep_alive: float = 300.0
    max_model_len: int | None = None


def measure_memory(engine: Any) -> int:
    """Return the bytes of an engine's weights and pages; 0 for an engine without arrays."""
    bare = getattr(engine, "engine", engine)
    measure = getattr(bare, "memory_bytes", None)
    return 0 if measure is None else measure()


def on_accelerator(engine: Any) -> bool:
    """Return whether the arrays of an engine are in the memory of accelerators."""
    bare = getattr(engine, "engine", engine)
    return getattr(bare, "platform", "cpu") != "cpu"


async def release(engine: Any) -> None:
    """Stop an engine and its compilation of programs, and free its weights and pages."""

    def work() -> None:
        shutdown = getattr(engine, "shutdown", None)
        if shutdown is not None:
            shutdown()
        drop = getattr(getattr(engine, "engine", engine), "drop_memory", None)
        if drop is not None:  # frees the arrays without a collection, which lasts 0.3 s
            drop()
        else:
            gc.collect()

    await asyncio.to_thread(work)
