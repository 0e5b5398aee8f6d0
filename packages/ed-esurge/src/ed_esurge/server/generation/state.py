"""What the models of one server share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ed_esurge.config import ServerLimits
from ed_esurge.server.http.auth import ApiKey
from ed_esurge.server.http.unknown import UnknownFieldsPolicy
from ed_esurge.server.response_store import ResponseStore
from ed_esurge.server.tracing import Tracing


class ServerState:
    """How far the server has got, and what it keeps.

    Args:
        limits: what clients may ask for at once.
        tracing: where spans of requests go; None: there are none.
        enable_sleep_mode: clients may let the engines sleep.
        unknown_fields: what becomes of unknown request fields: "ignore", "warn" or "refuse".
        keys: the API keys of the server.
        share_prefix_cache: the prefix cache is shared among the keys.

    Attributes:
        draining: the server was asked to stop.
        stopping: set when it waits no longer for what runs.
        responses: those that are kept.
    """

    def __init__(
        self,
        limits: ServerLimits,
        tracing: Tracing | None = None,
        enable_sleep_mode: bool = False,
        unknown_fields: str = "warn",
        keys: Sequence[ApiKey] = (),
        share_prefix_cache: bool = False,
    ) -> None:
        self.limits, self.tracing = limits, tracing
        self.enable_sleep_mode = enable_sleep_mode
        self.keys, self.share_prefix_cache = tuple(keys), share_prefix_cache
        self.unknown_fields = UnknownFieldsPolicy(unknown_fields)
        self.draining = False
        self.stopping = asyncio.Event()
        self.responses = ResponseStore(limits.max_stored_responses)
