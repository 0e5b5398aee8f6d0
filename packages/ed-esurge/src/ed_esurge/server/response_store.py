"""Stored answers of `/v1/responses`, which later requests of the same key may follow."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any

from ed_esurge.server.http.errors import APIError

MAX_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored response.

    Attributes:
        response: as it was answered.
        messages: the conversation up to its end, without instructions.
        size: of both, in bytes of JSON.
    """

    response: dict[str, Any]
    messages: list[dict[str, Any]]
    size: int


class _Shelf:
    """The responses of one owner, oldest first.

    Attributes:
        bytes: total size of the responses.
    """

    def __init__(self) -> None:
        self.kept: OrderedDict[str, Stored] = OrderedDict()
        self.bytes = 0

    def put(self, stored: Stored) -> None:
        """Add a response."""
        self.kept[stored.response["id"]] = stored
        self.bytes += stored.size

    def drop(self, name: str | None = None) -> int:
        """Remove a response, by default the oldest, and return its size."""
        name = next(iter(self.kept)) if name is None else name
        size = self.kept.pop(name).size
        self.bytes -= size
        return size


class ResponseStore:
    """The last responses of each owner, in memory. The oldest make room for new ones.

    Args:
        most: responses kept for each owner. All owners together have `MAX_BYTES`. Beyond that, the
            owner with the most bytes loses its oldest response.
    """

    def __init__(self, most: int) -> None:
        self._most, self._bytes = most, 0
        self._shelves: defaultdict[str, _Shelf] = defaultdict(_Shelf)

    def put(self, response: dict[str, Any], messages: list[dict[str, Any]], owner: str) -> None:
        """Store a response.

        Args:
            owner: see `auth.owner_of`.
        """
        size = len(json.dumps([response, messages]))
        own = self._shelves[owner]
        own.put(Stored(response, messages, size))
        self._bytes += size
        while len(own.kept) > self._most:
            self._bytes -= own.drop()
        while self._bytes > MAX_BYTES:
            self._bytes -= max(self._shelves.values(), key=lambda shelf: shelf.bytes).drop()

    def get(self, name: str, owner: str, *, param: str | None = None) -> Stored:
        """Return a response.

        Raises:
            APIError: 404, the owner has no response of that id.
        """
        known = self._shelves[owner].kept.get(name)
        if known is None:
            raise APIError(
                f"there is no response {name!r:.100}: it was not stored, was deleted, or made room "
                f"for later ones (the last {self._most} are kept)",
                status=404,
                param=param,
                code="response_not_found",
            )
        return known

    def delete(self, name: str, owner: str) -> None:
        """Delete a response. Raises APIError: 404."""
        self.get(name, owner)
        self._bytes -= self._shelves[owner].drop(name)
