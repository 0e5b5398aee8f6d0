"""The bytes of request bodies that the server holds at the same time, over all clients."""

from __future__ import annotations

from collections import Counter

from ed_esurge.server.http.auth import owner_of
from ed_esurge.server.http.errors import APIError
from ed_esurge.server.http.scope import Scope

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
