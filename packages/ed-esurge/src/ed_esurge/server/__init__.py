"""The OpenAI-compatible HTTP server over the engine.

`create_app(engine)` builds the ASGI application; `serve(engine)` runs it under uvicorn until a
signal, `background(engine)` while a block of code runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ed_infra.lazy import attach

if TYPE_CHECKING:
    from ed_esurge.config import ApiKey as ApiKey
    from ed_esurge.server.app import create_app as create_app
    from ed_esurge.server.launch import background as background
    from ed_esurge.server.launch import serve as serve
    from ed_esurge.server.options import ServerOptions as ServerOptions
    from ed_esurge.server.options import read_keys as read_keys

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "ApiKey": "ed_esurge.config",
        "ServerOptions": "ed_esurge.server.options",
        "background": "ed_esurge.server.launch",
        "create_app": "ed_esurge.server.app",
        "read_keys": "ed_esurge.server.options",
        "serve": "ed_esurge.server.launch",
    },
)
