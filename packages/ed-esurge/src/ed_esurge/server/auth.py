"""Optional API keys: `Authorization: Bearer …`, checked in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from ed_esurge.server.asgi import ASGIApp, Receive, Scope, Send
from ed_esurge.server.errors import APIError

# What load balancers and Prometheus read; neither says anything about requests' contents.
OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/metrics", "/version"})


class BearerAuth:
    """ASGI middleware that lets only known keys pass.

    Keys are kept as SHA-256 digests: comparing those takes the same time whatever was sent.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or scope["path"] in OPEN_PATHS
            or scope["method"] == "OPTIONS"  # CORS asks before it has a key to send
            or self._known(scope)
        ):
            await self.app(scope, receive, send)
            return
        error = APIError(
            "this server needs an API key: send `Authorization: Bearer YOUR_KEY` "
            "(the openai client: api_key=)",
            status=401,
            code="invalid_api_key",
        )
        response = error.response()
        response.headers["WWW-Authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, key = value.partition(b" ")
                digest = hashlib.sha256(key.strip()).digest()
                matches = [hmac.compare_digest(digest, known) for known in self._digests]
                return scheme.lower() == b"bearer" and any(matches)
        return False
