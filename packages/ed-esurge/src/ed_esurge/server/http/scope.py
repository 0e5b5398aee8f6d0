"""The types of the ASGI interface (https://asgi.readthedocs.io), for middleware and streams."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Where a scope has a function that sends a part of a stream at once: `send` would take it through
#: every layer of middleware and a model of the protocol, for each token of each client.
WRITER = "ed_esurge.write_chunk"
