"""Responses that are kept, so that others can follow them."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from ed_esurge.server.errors import APIError

MAX_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class Stored:
    """A response.

    Attributes:
        response: as it was answered.
        messages: the conversation up to its end, without instructions.
        size: of both, in bytes of JSON.
    """

    response: dict[str, Any]
    messages: list[dict[str, Any]]
    size: int


class ResponseStore:
    """The last responses, in memory; the oldest make room.

    Args:
        most: how many are kept. There is a limit of bytes besides.
    """

    def __init__(self, most: int) -> None:
        self._most, self._bytes = most, 0
        self._kept: OrderedDict[str, Stored] = OrderedDict()

    def put(self, response: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        """Keep a response."""
        size = len(json.dumps([response, messages]))
        self._kept[response["id"]] = Stored(response, messages, size)
        self._bytes += size
        while self._kept and (len(self._kept) > self._most or self._bytes > MAX_BYTES):
            self._bytes -= self._kept.popitem(last=False)[1].size

    def get(self, name: str, *, param: str | None = None) -> Stored:
        """A response.

        Raises:
            APIError: 404, it is not kept (any more).
        """
        known = self._kept.get(name)
        if known is None:
            raise APIError(
                f"there is no response {name!r:.100}: it was not stored, was deleted, or made room "
                f"for later ones (the last {self._most} are kept)",
                status=404,
                param=param,
                code="response_not_found",
            )
        return known

    def delete(self, name: str) -> None:
        """Forget a response. Raises APIError: 404."""
        self._bytes -= self.get(name).size
        del self._kept[name]
