"""Every model behind one server, and which of them a request means."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ed_infra.errors import ConfigError, did_you_mean

from ed_esurge.server.generation.models import Served
from ed_esurge.server.generation.state import ServerState
from ed_esurge.server.http.errors import APIError
from ed_esurge.server.metrics import ServerMetrics
from ed_esurge.server.stores import BatchStore


class Site:
    """The models of a server.

    Args:
        models: at least one; requests that name none get the first.
        state: what they share.
        metrics: where all is counted.
        batches: where files and batches are; None: there are none.

    Attributes:
        batched: set when there is a new batch.
        batch_trouble: why batches wait for the disk. None: they run.

    Raises:
        ConfigError: two have the same name.
    """

    def __init__(
        self,
        models: Sequence[Served],
        state: ServerState,
        metrics: ServerMetrics,
        batches: BatchStore | None = None,
    ) -> None:
        self.models, self.state, self.metrics = tuple(models), state, metrics
        self.batches, self.batched = batches, asyncio.Event()
        self.batch_trouble: str | None = None
        names = [name for served in self.models for name in served.names]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"two models are called {name!r}: each needs a name of its own "
                    "(served_model_name)"
                )

    @property
    def first(self) -> Served:
        """The model of requests that name none."""
        return self.models[0]

    def stall_batches(self, reason: str | None) -> None:
        """Note for `/health` and the metrics why batches wait for the disk; None: they run."""
        self.batch_trouble = reason
        self.metrics.batches_stalled.set(reason is not None)

    def find(self, name: str | None, owner: str) -> Served:
        """Return a model, or one of its adapters, for the requests of one key.

        Args:
            name: what the request calls the model. None: the first model.
            owner: see `owner_of`. The adapters of other keys do not exist for it.

        Raises:
            APIError: 404 `model_not_found`.
        """
        if name is None:
            return self.first.seen_by(owner)
        for served in self.models:
            if name in served.names:
                return served.seen_by(owner)
            if name in served.adapters(owner):
                return served.seen_by(owner, adapter=name)
        known = [
            name for served in self.models for name in (*served.names, *served.adapters(owner))
        ]
        hint = did_you_mean(name, known) or f"; this server has {', '.join(known)}"
        raise APIError(
            f"the model {name[:160]!r} does not exist{hint}",
            status=404,
            param="model",
            code="model_not_found",
        )

    def cards(self, owner: str) -> list[dict[str, Any]]:
        """Return the entries of `/v1/models`: the names of each model, then its adapters.

        Args:
            owner: see `owner_of`. The adapters of other keys are left out.
        """
        cards = []
        for served in self.models:
            cards += [served.card(name) for name in served.names]
            for adapter in served.adapters(owner).values():
                root = adapter.source or adapter.name
                cards.append({**served.card(adapter.name), "root": root, "parent": served.name})
        return cards
