"""Optional API keys: hashed, compared in constant time, each with limits and an end."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from ed_infra.errors import ConfigError
from ed_infra.options import Count, Options
from pydantic import AwareDatetime, Field, TypeAdapter, ValidationError

from ed_esurge.server.asgi import ASGIApp, Receive, Scope, Send
from ed_esurge.server.errors import APIError

# What load balancers, Prometheus and browsers read; none says anything about requests' contents.
# The page asks for a key, and sends it.
OPEN_PATHS = frozenset(
    {"/", "/health", "/health/live", "/health/ready", "/health/decode", "/metrics", "/version"}
)


class ApiKey(Options):
    """A key as a server knows it: never the key itself."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Digest of the key, hexadecimal: `printf %s KEY | sha256sum`."""
    name: Annotated[str, Field(max_length=256)] = ""
    """Whose it is, for those who read the file."""
    expires: AwareDatetime | None = None
    """From then on it opens nothing; with a time zone (`2030-01-01T00:00:00Z`)."""
    max_concurrent_requests: Count | None = None
    """Its requests at the same time (429)."""
    requests_per_minute: Count | None = None
    """Its requests of the last 60 seconds (429)."""

    @classmethod
    def of(cls, key: str) -> ApiKey:
        """A key without limits."""
        return cls(sha256=hashlib.sha256(key.encode()).hexdigest())


def read_keys(path: str | Path) -> list[ApiKey]:
    """The keys of a file: a JSON list of `ApiKey`.

    Raises:
        ConfigError: the file cannot be read, or is no such list.
    """
    try:
        raw = json.loads(Path(path).read_text("utf-8"))
        return TypeAdapter(Annotated[list[ApiKey], Field(min_length=1)]).validate_python(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the list"
        raise ConfigError(f"api_key_file {path}: {place}: {first['msg']}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"api_key_file {path} cannot be read ({error}): write a JSON list of objects with "
            "sha256 and, if wanted, name, expires, max_concurrent_requests, requests_per_minute"
        ) from None


class _Account:
    """A key, and what was done with it lately."""

    def __init__(self, key: ApiKey) -> None:
        self.key, self.digest = key, bytes.fromhex(key.sha256)
        self.inside = 0
        self._times: deque[float] = deque()

    def check(self) -> None:
        """Raises APIError: the key has expired."""
        if self.key.expires is not None and datetime.now(UTC) >= self.key.expires:
            raise APIError(
                f"this API key has expired ({self.key.expires.isoformat()}): ask for another",
                status=401,
                code="invalid_api_key",
            )

    def enter(self) -> None:
        """Count a request. Raises APIError: the key has no more."""
        most, rate = self.key.max_concurrent_requests, self.key.requests_per_minute
        now = time.monotonic()
        while self._times and now - self._times[0] >= 60:
            self._times.popleft()
        said = None
        if most is not None and self.inside >= most:
            said = f"{most} requests at the same time"
        elif rate is not None and len(self._times) >= rate:
            said = f"{rate} requests a minute"
        if said is not None:
            raise APIError(
                f"this API key may have {said}: try again later",
                status=429,
                code="rate_limit_exceeded",
            )
        if rate is not None:
            self._times.append(now)
        self.inside += 1


class BearerAuth:
    """ASGI middleware that lets only known keys pass.

    Keys are kept as SHA-256 digests: comparing those takes the same time whatever was sent.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[ApiKey]) -> None:
        self.app = app
        self._accounts = [_Account(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or scope["path"] in OPEN_PATHS
            or scope["method"] == "OPTIONS"  # CORS asks before it has a key to send
        ):
            await self.app(scope, receive, send)
            return
        counted = scope["method"] == "POST"
        try:
            account = self._account(scope)
            scope["ed_esurge.owner"] = account.key.sha256
            account.check()
            if counted:
                account.enter()
        except APIError as error:
            response = error.response()
            if error.status == 401:
                response.headers["WWW-Authenticate"] = "Bearer"
            await response(scope, receive, send)
            return
        try:
            await self.app(scope, receive, send)
        finally:
            account.inside -= counted

    def _account(self, scope: Scope) -> _Account:
        digest = hashlib.sha256(_key(scope)).digest()
        matches = [one for one in self._accounts if hmac.compare_digest(digest, one.digest)]
        if not matches:
            raise APIError(
                "this server needs an API key: send `Authorization: Bearer YOUR_KEY` "
                "(the openai and anthropic clients: api_key=)",
                status=401,
                code="invalid_api_key",
            )
        return matches[0]


def owner_of(scope: Scope) -> str:
    """Whose request it is: the digest of its key, or nothing where no keys are asked for."""
    return scope.get("ed_esurge.owner", "")


def _key(scope: Scope) -> bytes:
    """The key that a request brings: OpenAI's header, or Anthropic's."""
    headers: dict[bytes, Any] = dict(reversed(scope["headers"]))
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return key.strip()
    return headers.get(b"x-api-key", b"").strip()
