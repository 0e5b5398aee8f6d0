"""The bytes of request bodies that the server holds at the same time, over all clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from ed_esurge.server.http.auth import owner_of
from ed_esurge.server.http.errors import APIError
from ed_esurge.server.http.scope import ASGIApp, Receive, Scope, Send

RESERVATION = "ed_esurge.reservation"


class Budget:
    """Bytes of bodies and uploads of all requests in flight.

    A client (an API key, or the address of a client without a key) with a request in flight gets
    at most half of the budget, so that one client cannot keep the others out.

    Args:
        most: bytes of all clients together.
    """

    def __init__(self, most: int) -> None:
        self.most, self.used = most, 0
        self.by_client: Counter[str] = Counter()

    def take(self, client: str, own: int, count: int) -> None:
        """Take bytes for a request.

        Args:
            own: bytes that this request has already taken.

        Raises:
            APIError: 503, the budget has too few bytes left.
        """
        held = self.by_client[client]
        others = held - own
        if self.used + count > self.most or (others and held + count > self.most // 2):
            raise APIError(
                f"the server holds {self.used} bytes of request bodies, and its limit is "
                f"{self.most} (max_bytes_in_flight; half of that for one client): try again later",
                status=503,
                code="server_overloaded",
            )
        self.used += count
        self.by_client[client] += count

    def give_back(self, client: str, count: int) -> None:
        """Return the bytes of a request that has ended."""
        self.used -= count
        self.by_client[client] -= count
        if not self.by_client[client]:
            del self.by_client[client]


class Reservation:
    """The bytes that one request has taken; `close` returns them."""

    def __init__(self, budget: Budget) -> None:
        self._budget, self._client, self._bytes = budget, "", 0

    def grow(self, scope: Scope, size: int) -> None:
        """Take bytes until the request has `size` of them.

        Raises:
            APIError: see `Budget.take`.
        """
        if size > self._bytes:
            self._client = self._client or _client_of(scope)
            self._budget.take(self._client, self._bytes, size - self._bytes)
            self._bytes = size

    def close(self) -> None:
        """Return all bytes."""
        if self._bytes:
            self._budget.give_back(self._client, self._bytes)
            self._bytes = 0


def _client_of(scope: Scope) -> str:
    address = scope.get("client") or ("",)
    return owner_of(scope) or str(address[0])


LOOPBACK = ("127.0.0.1", "localhost", "::1")


#: Methods that change nothing, so that any page may send them: without CORS no page reads answers.
SAFE = ("GET", "HEAD", "OPTIONS")


class Admission:
    """Refuses foreign `Host` headers, requests of foreign web pages, and requests beyond a number.

    A web page may let its own name point at this machine ("DNS rebinding"). The requests of such a
    page carry that name. A browser also sends forms and simple requests of any page to any server
    ("cross-site request forgery"), and says so in `Origin` and `Sec-Fetch-Site`.

    Args:
        hosts: names and addresses, without ports, that the header may have; None: any.
        origins: web origins whose pages may send requests beside the server's own; `*`: all.
        most: POST requests at the same time. Reading (health, metrics) is not counted.
        most_bytes: bytes of request bodies at the same time.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: Iterable[str] | None,
        origins: Iterable[str],
        most: int,
        most_bytes: int,
    ) -> None:
        self.app, self.most, self.budget = app, most, Budget(most_bytes)
        self.hosts = None if hosts is None else frozenset(name.lower() for name in hosts)
        self.origins = frozenset(origin.lower().rstrip("/") for origin in origins)
        self.inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {
            name: value.decode("latin-1").strip().lower() for name, value in scope["headers"]
        }
        host = _host(headers)
        if self.hosts is not None and host not in self.hosts:
            error = APIError(
                f"this server does not answer for the host {host!r}: start it with "
                "allowed_hosts=[...] to name more than this machine",
                status=421,
                code="host_not_allowed",
            )
            await error.response()(scope, receive, send)
        elif scope["method"] not in SAFE and self._is_foreign(headers):
            error = APIError(
                f"a web page of {headers.get(b'origin', 'another site')!r:.200} sent this request, "
                "and this server does not take requests of that page: list its origin in "
                "cors_origins",
                status=403,
                code="origin_not_allowed",
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
            reservation = scope[RESERVATION] = Reservation(self.budget)
            try:
                await self.app(scope, receive, send)
            finally:
                self.inside -= 1
                reservation.close()

    def _is_foreign(self, headers: Mapping[bytes, str]) -> bool:
        """Whether a browser sent the request for a page of another site that is not listed.

        The rules are those of `http.CrossOriginProtection` in Go. Clients that are not browsers
        send neither header.
        """
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
        if "*" in self.origins or origin in self.origins:
            return False
        if site is not None:
            return site not in ("same-origin", "none")
        return origin is not None and urlsplit(origin).netloc != headers.get(b"host")


def _host(headers: Mapping[bytes, str]) -> str:
    """The host of a request, without port and brackets."""
    text = headers.get(b"host", "")
    return text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]
