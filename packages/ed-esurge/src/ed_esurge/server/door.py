"""ASGI middleware at the door: for which hosts the server answers, how many requests at once."""

from __future__ import annotations

from collections.abc import Iterable

from ed_esurge.server.asgi import ASGIApp, Receive, Scope, Send
from ed_esurge.server.errors import APIError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Door:
    """Refuses foreign `Host` headers, and requests beyond a number.

    A web page may let its own name point at this machine ("DNS rebinding"); its requests then carry
    that name.

    Args:
        hosts: names and addresses, without ports, that the header may have; None: any.
        most: POST requests at the same time. Reading (health, metrics) is not counted.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str] | None, most: int) -> None:
        self.app, self.most = app, most
        self.hosts = None if hosts is None else frozenset(name.lower() for name in hosts)
        self.inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        host = _host(scope)
        if self.hosts is not None and host not in self.hosts:
            error = APIError(
                f"this server does not answer for the host {host!r}: start it with "
                "allowed_hosts=[...] to name more than this machine",
                status=421,
                code="host_not_allowed",
            )
            await error.response()(scope, receive, send)
        elif scope["method"] != "POST":
            await self.app(scope, receive, send)
        elif self.inside >= self.most:
            error = APIError(
                f"{self.most} requests are being answered, which is this server's limit: "
                "try again in a moment",
                status=429,
                code="rate_limit_exceeded",
            )
            await error.response()(scope, receive, send)
        else:
            self.inside += 1
            try:
                await self.app(scope, receive, send)
            finally:
                self.inside -= 1


def _host(scope: Scope) -> str:
    """The host of a request, without port and brackets."""
    for name, value in scope["headers"]:
        if name == b"host":
            text = value.decode("latin-1").strip().lower()
            if text.startswith("["):
                return text[1:].partition("]")[0]
            return text.partition(":")[0]
    return ""
