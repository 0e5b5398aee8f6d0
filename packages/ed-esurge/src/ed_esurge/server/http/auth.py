"""Optional API keys with limits and an expiry date, stored as digests."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections import deque
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from starlette.types import ASGIApp, Receive, Scope, Send

from ed_esurge.config import ApiKey
from ed_esurge.server.http.errors import APIError

#: Keys of the ASGI scope: the digest of the request's key, and "anyone", "key" or "admin". The
#: scope of a server without keys has neither.
OWNER, ROLE = "ed_esurge.owner", "ed_esurge.role"

#: Methods without side effects. Any page may send them, because it cannot read the answers.
SAFE = ("GET", "HEAD", "OPTIONS")

Access = Literal["open", "key", "admin"]
"""Who may call a route of a server with keys: anyone, any key, or an administrator."""


class _Account:
    """A key and its recent requests."""

    def __init__(self, key: ApiKey, share: int | None) -> None:
        self.key, self.digest = key, bytes.fromhex(key.sha256)
        self.role = "admin" if key.admin else "key"
        limits = [limit for limit in (key.max_concurrent_requests, share) if limit is not None]
        self._most = min(limits, default=None)
        self.inside = {True: 0, False: 0}  # by whether the method is safe
        self._times: deque[float] = deque()

    def check(self) -> None:
        """Raise APIError if the key has expired."""
        if self.key.expires is not None and datetime.now(UTC) >= self.key.expires:
            raise APIError(
                f"this API key has expired ({self.key.expires.isoformat()}): use another key",
                status=401,
                code="invalid_api_key",
            )

    def enter(self, method: str) -> None:
        """Count a request. Raise APIError if the key has reached a limit.

        GET requests have a count of their own, and no limit per minute, because clients poll.
        """
        safe = method in SAFE
        most, rate = self._most, None if method != "POST" else self.key.requests_per_minute
        now = time.monotonic()
        while self._times and now - self._times[0] >= 60:
            self._times.popleft()
        limit = None
        if most is not None and self.inside[safe] >= most:
            limit = f"{most} concurrent requests"
        elif rate is not None and len(self._times) >= rate:
            limit = f"{rate} requests a minute"
        if limit is not None:
            raise APIError(
                f"this API key has reached its limit of {limit}: try again later",
                status=429,
                code="rate_limit_exceeded",
            )
        if rate is not None:
            self._times.append(now)
        self.inside[safe] += 1

    def leave(self, method: str) -> None:
        """End the count of a request."""
        self.inside[method in SAFE] -= 1


class BearerAuth:
    """ASGI middleware that finds the key of each request, and rejects requests without a key.

    The comparison of SHA-256 digests has the same duration for every key.

    Args:
        keys: the known keys. If all keys belong to administrators, other routes require no key.
        open_paths: paths without a key, for load balancers, Prometheus and browsers.
        max_requests: maximum number of concurrent requests of the server. If there are several
            keys of users, each may use half.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[ApiKey],
        open_paths: Collection[str],
        max_requests: int,
    ) -> None:
        self.app = app
        has_several_keys = sum(not key.admin for key in keys) > 1
        share = max(1, max_requests // 2) if has_several_keys else None
        self._accounts = [_Account(key, None if key.admin else share) for key in keys]
        self._open_paths = frozenset(open_paths)
        self._needed = not all(key.admin for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or scope["path"] in self._open_paths
            or scope["method"] == "OPTIONS"  # CORS requests have no key
        ):
            await self.app(scope, receive, send)
            return
        account = None
        scope[ROLE] = "anyone"
        try:
            account = self._account(scope)
            if account is not None:
                scope[OWNER], scope[ROLE] = account.key.sha256, account.role
                account.check()
                account.enter(scope["method"])
        except APIError as error:
            response = error.response()
            if error.status == 401:
                response.headers["WWW-Authenticate"] = "Bearer"
            await response(scope, receive, send)
            return
        try:
            await self.app(scope, receive, send)
        finally:
            if account is not None:
                account.leave(scope["method"])

    def _account(self, scope: Scope) -> _Account | None:
        digest = hashlib.sha256(_key(scope)).digest()
        matches = [one for one in self._accounts if hmac.compare_digest(digest, one.digest)]
        if not matches and self._needed:
            raise APIError(
                "this server requires an API key: send `Authorization: Bearer YOUR_KEY` "
                "(the openai and anthropic clients: api_key=)",
                status=401,
                code="invalid_api_key",
            )
        return matches[0] if matches else None


def get_owner(scope: Scope) -> str:
    """Return the owner of a request: the digest of its key, or empty without a key."""
    return scope.get(OWNER, "")


def check_admin(scope: Scope) -> None:
    """Check the key of a request to an administrative route.

    A server without keys has one user, who may call all routes.

    Raises:
        APIError: 403.
    """
    if scope.get(ROLE, "admin") != "admin":
        raise APIError(
            "this route requires the key of an administrator: start the server with admin_api_key "
            "(the environment variable ESURGE_ADMIN_API_KEY), and send that key",
            status=403,
            code="admin_key_required",
        )


def _key(scope: Scope) -> bytes:
    """Return the key in OpenAI's or Anthropic's header."""
    headers: dict[bytes, Any] = dict(reversed(scope["headers"]))
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return key.strip()
    return headers.get(b"x-api-key", b"").strip()
