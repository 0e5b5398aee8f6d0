"""The engine: `eSurge` for one thread, `AsyncEngine` for a server."""

from ed_esurge.engine.async_engine import AsyncEngine as AsyncEngine
from ed_esurge.engine.surge import eSurge as eSurge

__all__ = ["AsyncEngine", "eSurge"]
