"""The engine: `eSurge` for one thread, `AsyncEngine` for a server."""

from typing import TYPE_CHECKING

from ed_infra.lazy import attach

if TYPE_CHECKING:
    from ed_esurge.engine.async_engine import AsyncEngine as AsyncEngine
    from ed_esurge.engine.surge import eSurge as eSurge

# Lazy, because a server that validates prompts for another engine does not need jax.
__getattr__, __dir__, __all__ = attach(
    __name__,
    {"AsyncEngine": "ed_esurge.engine.async_engine", "eSurge": "ed_esurge.engine.surge"},
)
