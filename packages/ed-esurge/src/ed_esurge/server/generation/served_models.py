"""All models of a server: those of the start, and further models."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

from ed_infra.errors import ConfigError, EasyDeLError, did_you_mean

from ed_esurge.server.generation.models import ServedModel, ServerState
from ed_esurge.server.http.errors import APIError
from ed_esurge.server.metrics import ServerMetrics
from ed_esurge.server.stores import BatchStore

logger = logging.getLogger(__name__)


class FurtherModels(Protocol):
    """Models beside those of the start, such as those of `ed_esurge.frontends.library`."""

    @property
    def models(self) -> Sequence[ServedModel]:
        """The models in memory."""
        ...

    def __contains__(self, name: str) -> bool: ...

    def names(self) -> list[str]:
        """Return the names of all models, loaded or not."""
        ...

    def lease(self, name: str, owner: str) -> AbstractAsyncContextManager[ServedModel]:
        """Return a block with a model, also for names of the start; see `ServedModels.using`."""
        ...

    def card(self, name: str) -> dict[str, Any]:
        """Return the entry of `/v1/models` for a name."""
        ...

    def run(self) -> AbstractAsyncContextManager[None]:
        """Return the block in which the server runs."""
        ...


class ServedModels:
    """The models of a server.

    Args:
        models: the models of the start. Requests without a model name use the first.
        state: the state that the models share.
        metrics: the counters of the server.
        batches: the files and batches; None = batches are not supported.

    Attributes:
        further: further models; None = the server has only the models of the start.
        batch_added: set when a batch is added.
        batch_trouble: why batches wait for the disk; None = batches run.

    Raises:
        ConfigError: two models have the same name.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        state: ServerState,
        metrics: ServerMetrics,
        batches: BatchStore | None = None,
    ) -> None:
        self.always, self.state, self.metrics = tuple(models), state, metrics
        self.further: FurtherModels | None = None
        state.all_models = lambda: self.models
        state.is_model = lambda name: (
            any(name in model.names for model in self.always)
            or (self.further is not None and name in self.further)
        )
        self.batches, self.batch_added = batches, asyncio.Event()
        self.batch_trouble: str | None = None
        names = [name for model in self.always for name in model.names]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"two models have the name {name!r}: choose different names (served_model_name)"
                )

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """The models in memory."""
        return self.always if self.further is None else (*self.always, *self.further.models)

    @property
    def first(self) -> ServedModel:
        """The model for requests without a model name.

        Raises:
            APIError: 400, the server has only models that are loaded on demand.
        """
        if not self.always:
            raise APIError(
                "this server loads models on demand: send the name of a model, see /v1/models",
                param="model",
                code="missing_required_parameter",
            )
        return self.always[0]

    @asynccontextmanager
    async def using(self, name: str | None, owner: str) -> AsyncGenerator[ServedModel]:
        """Yield a model for a request, after loading. The model stays in memory during the block.

        Args:
            name: see `find`; also a further model.
            owner: see `find`.

        Raises:
            APIError: 400, the model needs too much memory; 404 `model_not_found`; 500, the model
                cannot be loaded; 503, another model did not release its memory in time.
        """
        if name is None or self.further is None:
            yield self.find(name, owner)
            return
        async with self.further.lease(name, owner) as model:
            yield model

    def known_names(self, owner: str) -> list[str]:
        """Return all names that a key may use."""
        names = [name for model in self.always for name in (*model.names, *model.adapters(owner))]
        if self.further is not None:
            names += [name for name in self.further.names() if name not in names]
        return names

    def unknown_model(self, name: str, owner: str) -> APIError:
        """Return the error of a name that no model has."""
        model_names = self.known_names(owner)
        hint = did_you_mean(name, model_names) or f"; this server has {', '.join(model_names)}"
        return APIError(
            f"the model {name[:160]!r} does not exist{hint}",
            status=404,
            param="model",
            code="model_not_found",
        )

    def stall_batches(self, reason: str | None) -> None:
        """Report why batches wait for the disk in `/health` and the metrics; None = batches run."""
        self.batch_trouble = reason
        self.metrics.batches_stalled.set(reason is not None)

    def find(self, name: str | None, owner: str) -> ServedModel:
        """Return a model, or one of its adapters, for the requests of one key.

        Args:
            name: the model name of the request; None = the first model.
            owner: owner of the request, see `get_owner`. Adapters of other keys are not found.

        Raises:
            APIError: 404 `model_not_found`.
        """
        if name is None:
            return self.first.seen_by(owner)
        for model in self.models:
            if name in model.names:
                return model.seen_by(owner)
            if name in model.adapters(owner):
                return model.seen_by(owner, adapter=name)
        raise self.unknown_model(name, owner)

    def cards(self, owner: str) -> list[dict[str, Any]]:
        """Return the entries of `/v1/models`: the names of each model, then its adapters.

        Args:
            owner: see `get_owner`. The adapters of other keys are omitted.
        """
        cards = []
        for model in self.always:
            cards += [model.card(name) for name in model.names]
            for adapter in model.adapters(owner).values():
                root = adapter.source or adapter.name
                cards.append({**model.card(adapter.name), "root": root, "parent": model.name})
        if self.further is None:
            return cards
        listed_names = {card["id"] for card in cards}
        for name in self.further.names():
            if name not in listed_names:
                try:
                    cards.append(self.further.card(name))
                except (EasyDeLError, OSError, ValueError) as error:
                    # The files changed, or are damaged. The other models are listed.
                    logger.warning("the model %s is not listed: %s", name, error)
        return cards
