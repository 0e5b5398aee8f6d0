"""Types of the ASGI interface (https://asgi.readthedocs.io), for middleware and streams."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Key of the scope for a function that writes a part of a stream to the connection. `send` would
#: pass every token through all middleware and the protocol's state machine.
WRITER = "ed_esurge.write_chunk"
