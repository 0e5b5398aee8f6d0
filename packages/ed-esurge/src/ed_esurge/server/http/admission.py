"""Admission of requests: hosts and origins, concurrent requests, bytes of request bodies."""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ed_esurge.server.http.auth import SAFE, get_owner
from ed_esurge.server.http.errors import APIError

RESERVATION = "ed_esurge.reservation"
#: Code of the error of a request that finds too many bytes in flight.
OVERLOADED = "server_overloaded"


class Budget:
    """The bytes of the bodies, uploads and answers of all requests in flight.

    A client (an API key, or the address of a client without a key) with several requests gets at
    most half of the budget, so that one client cannot block the others.

    Args:
        most: maximum number of bytes of all clients together.
    """

    def __init__(self, most: int) -> None:
        self.most, self.used, self.released = most, 0, 0
        self.by_client: Counter[str] = Counter()

    def reserve(self, client: str, reserved_bytes: int, count: int) -> None:
        """Reserve bytes for a request.

        Args:
            reserved_bytes: bytes that the request has already reserved.

        Raises:
            APIError: 503, the remaining budget is too small.
        """
        client_bytes = self.by_client[client]
        other_bytes = client_bytes - reserved_bytes
        if self.used + count > self.most or (other_bytes and client_bytes + count > self.most // 2):
            raise APIError(
                f"the server holds {self.used} bytes of requests and answers, and its limit is "
                f"{self.most} (max_bytes_in_flight; half of that for one client): try again later",
                status=503,
                code=OVERLOADED,
            )
        self.used += count
        self.by_client[client] += count

    def release(self, client: str, count: int) -> None:
        """Release the bytes of a request that has ended."""
        self.used -= count
        self.released += count
        self.by_client[client] -= count
        if not self.by_client[client]:
            del self.by_client[client]


class Reservation:
    """The reserved bytes of one request."""

    def __init__(self, budget: Budget) -> None:
        self._budget, self._client, self._bytes = budget, "", 0

    def grow(self, scope: Scope, size: int) -> None:
        """Reserve bytes until the request has `size` bytes.

        Raises:
            APIError: see `Budget.reserve`.
        """
        if size > self._bytes:
            self._client = self._client or get_client(scope)
            self._budget.reserve(self._client, self._bytes, size - self._bytes)
            self._bytes = size

    def add(self, scope: Scope, count: int) -> None:
        """Reserve further bytes. Raises APIError: see `Budget.reserve`."""
        self.grow(scope, self._bytes + count)

    def move(self) -> Reservation:
        """Return a reservation that owns all bytes, for work that outlives the request."""
        moved = Reservation(self._budget)
        moved._client, moved._bytes = self._client, self._bytes
        self._bytes = 0
        return moved

    def shrink(self, count: int) -> None:
        """Release some of the bytes."""
        self._budget.release(self._client, count)
        self._bytes -= count

    def close(self) -> None:
        """Release all bytes."""
        if self._bytes:
            self._budget.release(self._client, self._bytes)
            self._bytes = 0


def return_free_memory() -> None:
    """Let the C library return its free memory to the system, if it can.

    glibc keeps the memory of long bodies and answers for later allocations.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:  # other C libraries return free memory by themselves
            trim(0)


def get_client(scope: Scope) -> str:
    """Return the client of a request: the digest of its key, or its address without a key."""
    address = scope.get("client") or ("",)
    return get_owner(scope) or str(address[0])


#: Bytes of ended requests after which the C library returns its free memory to the system.
RETURNED_BYTES = 2**26
#: Seconds after which it returns the free memory of fewer bytes.
RETURN_SECONDS = 4.0
#: Length in bytes from which an answer is in the budget while its client reads.
COUNTED_ANSWER = 2**16


class CountedAnswer:
    """The `send` of a request that counts a long answer until it has been written.

    The head of the answer is sent with the first part of the body, so that an answer that does not
    fit in the budget becomes an error. Streams consist of short parts, which are not counted.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._head: Message | None = None
        self._refused = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            return
        if self._refused:
            return
        head, self._head = self._head, None
        size = len(message.get("body", b""))
        if head is None or size < COUNTED_ANSWER:
            if head is not None:
                await self._send(head)
            await self._send(message)
            return
        reservation: Reservation = self._scope[RESERVATION]
        try:
            reservation.add(self._scope, size)
        except APIError as error:
            self._refused = True
            await error.response()(self._scope, self._receive, self._send)
            return
        try:
            await self._send(head)
            await self._send(message)
        finally:
            reservation.shrink(size)


LOOPBACK = ("127.0.0.1", "localhost", "::1")


#: Methods that a request may have; routes use some of them.
HTTP_METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS", "PUT", "PATCH"})
#: Maximum bytes of the path and the query, and of the complete head of a request. h11 has a limit
#: for heads that arrive in several parts only.
MAX_TARGET_BYTES, MAX_HEAD_BYTES = 2**13, 2**14


def check_head(scope: Scope) -> None:
    """Check the method and the sizes of the head of a request.

    Raises:
        APIError: 405, the method is unknown; 414, the target is too long; 431, the headers.
    """
    method = scope["method"]
    if method not in HTTP_METHODS:
        raise APIError(
            f"the method {method[:20]!r} is unknown: use one of {', '.join(sorted(HTTP_METHODS))}",
            status=405,
            code="method_not_allowed",
        )
    target = len(scope.get("raw_path") or scope["path"]) + len(scope["query_string"])
    if target > MAX_TARGET_BYTES:
        raise APIError(
            f"the URL has {target} bytes, and the limit is {MAX_TARGET_BYTES}: send long values in "
            "the body of a POST request",
            status=414,
            code="url_too_long",
        )
    size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    if size > MAX_HEAD_BYTES:
        raise APIError(
            f"the headers have {size} bytes, and the limit is {MAX_HEAD_BYTES}: send fewer headers",
            status=431,
            code="headers_too_large",
        )


class Admission:
    """ASGI middleware that rejects foreign hosts, foreign web pages, and too many requests.

    The owner of a web page can map the name of the page to this machine ("DNS rebinding"). Requests
    of such a page have that name in `Host`. A browser also sends forms and simple requests of any
    page to any server ("cross-site request forgery"), with the headers `Origin` and
    `Sec-Fetch-Site`.

    Args:
        hosts: allowed names and addresses in `Host`, without ports; None = any.
        origins: web origins whose pages may send requests, in addition to the server's own pages;
            `*` = all.
        max_requests: maximum number of concurrent requests with side effects, and of the others.
            Each kind has its own count, so that a busy server answers GET requests.
        budget: the bytes in flight.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: Iterable[str] | None,
        origins: Iterable[str],
        max_requests: int,
        budget: Budget,
    ) -> None:
        self.app, self.max_requests, self.budget = app, max_requests, budget
        self.hosts = None if hosts is None else frozenset(name.lower() for name in hosts)
        self.origins = frozenset(origin.lower().rstrip("/") for origin in origins)
        self.running = {True: 0, False: 0}  # by whether the method is safe
        self._return: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            check_head(scope)
        except APIError as error:
            await error.response()(scope, receive, send)
            return
        headers = {
            name: value.decode("latin-1").strip().lower() for name, value in scope["headers"]
        }
        host = _host(headers)
        if self.hosts is not None and host not in self.hosts:
            error = APIError(
                f"this server does not serve the host {host!r}: start the server with "
                "allowed_hosts=[...] to allow more names than those of this machine",
                status=421,
                code="host_not_allowed",
            )
            await error.response()(scope, receive, send)
        elif scope["method"] not in SAFE and self._is_foreign(headers):
            error = APIError(
                f"a web page of {headers.get(b'origin', 'another site')!r:.200} sent this request, "
                "and this server does not allow requests of that page: add its origin to "
                "cors_origins",
                status=403,
                code="origin_not_allowed",
            )
            await error.response()(scope, receive, send)
        elif self.running[safe := scope["method"] in SAFE] >= self.max_requests:
            error = APIError(
                f"the server is answering {self.max_requests} requests, its limit: try again later",
                status=429,
                code="rate_limit_exceeded",
            )
            await error.response()(scope, receive, send)
        else:
            self.running[safe] += 1
            reservation = scope[RESERVATION] = Reservation(self.budget)
            try:
                # The answers of other methods are counted before their requests are admitted.
                counted = CountedAnswer(scope, receive, send) if safe else send
                await self.app(scope, receive, counted)
            finally:
                self.running[safe] -= 1
                reservation.close()
                self._return_memory_later()

    def _return_memory_later(self) -> None:
        """Return free memory now if requests have freed much of it, and otherwise soon."""
        if self.budget.released >= RETURNED_BYTES:
            self._return_memory()
        elif self.budget.released and self._return is None:
            loop = asyncio.get_running_loop()
            self._return = loop.call_later(RETURN_SECONDS, self._return_memory)

    def _return_memory(self) -> None:
        if self._return is not None:
            self._return.cancel()
        self._return, self.budget.released = None, 0
        asyncio.get_running_loop().run_in_executor(None, return_free_memory)

    def _is_foreign(self, headers: Mapping[bytes, str]) -> bool:
        """Return whether a page of an unlisted site sent the request.

        The rules are those of `http.CrossOriginProtection` in Go. Only browsers send the headers.
        """
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
        if "*" in self.origins or origin in self.origins:
            return False
        if site is not None:
            return site not in ("same-origin", "none")
        return origin is not None and urlsplit(origin).netloc != headers.get(b"host")


def _host(headers: Mapping[bytes, str]) -> str:
    """Return the host of a request without port and brackets."""
    text = headers.get(b"host", "")
    return text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]
