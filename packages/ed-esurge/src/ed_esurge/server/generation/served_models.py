"""All models of a server: those of the start, models of a directory, and derived models."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from ed_infra.errors import CheckpointError, ConfigError, EasyDeLError, did_you_mean

from ed_esurge.certificates import certificate_summary
from ed_esurge.server.generation.models import ServedModel, ServerState, build_certificate_fields
from ed_esurge.server.http.errors import APIError, hide_paths
from ed_esurge.server.library.checkpoint_files import CheckpointCache
from ed_esurge.server.library.definitions import DefinitionStore, ModelDefinition
from ed_esurge.server.library.directory import ModelDirectory
from ed_esurge.server.metrics import ServerMetrics
from ed_esurge.server.stores import BatchStore

logger = logging.getLogger(__name__)


class ServedModels:
    """The models of a server.

    Args:
        models: the models of the start. Requests without a model name use the first.
        state: the state that the models share.
        metrics: the counters of the server.
        batches: the files and batches; None = batches are not supported.
        directory: models that are loaded on demand.
        definitions: models that clients derive; None = clients cannot derive models.

    Attributes:
        checkpoints: the files of the models of the start.
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
        directory: ModelDirectory[ServedModel] | None = None,
        definitions: DefinitionStore | None = None,
    ) -> None:
        self.always, self.state, self.metrics = tuple(models), state, metrics
        self.directory, self.definitions = directory, definitions
        state.all_models = lambda: self.models
        state.is_model = lambda name: (
            self.has_weights(name) or (definitions is not None and name in definitions)
        )
        self.batches, self.batch_added = batches, asyncio.Event()
        self.checkpoints = CheckpointCache(len(self.always))
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
        if self.directory is None:
            return self.always
        return (*self.always, *(loaded.model for loaded in self.directory.loaded.values()))

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
            name: see `find`; also a model of the directory, or a derived model.
            owner: see `find`.

        Raises:
            APIError: 400, the model needs too much memory; 404 `model_not_found`; 500, the model
                cannot be loaded; 503, another model did not release its memory in time.
        """
        definition = self.definition(name)
        base = name if definition is None else definition.source
        async with self._load_model(base, owner) as model:
            if definition is not None and name is not None:
                model.name, model.definition = name, definition
            yield model

    @asynccontextmanager
    async def _load_model(self, name: str | None, owner: str) -> AsyncGenerator[ServedModel]:
        directory = self.directory
        if name is None or directory is None or self._always(name, owner):
            model = self.find(name, owner)
            with model.activity.using():
                yield model
            return
        if directory.files(name) is None:
            raise self._unknown(name, owner)
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self.state.limits.request_timeout):
                    model, seconds = await stack.enter_async_context(directory.lease(name))
            except TimeoutError:
                raise APIError(
                    f"the model {name!r} could not be loaded in time, because other models are in "
                    "use: try again later",
                    status=503,
                    code="model_loading",
                ) from None
            except ConfigError as error:
                raise APIError(
                    hide_paths(error, directory.folder), param="model", code="model_not_loadable"
                ) from None
            except EasyDeLError as error:
                raise APIError(
                    f"the model {name!r} cannot be loaded: {hide_paths(error, directory.folder)}",
                    status=500,
                    code="model_not_loadable",
                ) from error
            model = model.seen_by(owner)
            model.load_seconds = seconds
            yield model

    def _always(self, name: str, owner: str) -> bool:
        return any(name in model.names or name in model.adapters(owner) for model in self.always)

    def definition(self, name: str | None) -> ModelDefinition | None:
        """Return the definition of a derived model; None for other names.

        Raises:
            APIError: 404, a source of the model does not exist.
        """
        definitions = self.definitions
        if definitions is None or name is None or name not in definitions:
            return None
        try:
            return definitions.resolve(name, self.has_weights)
        except ConfigError as error:
            raise APIError(str(error), status=404, param="model", code="model_not_found") from None

    def has_weights(self, name: str) -> bool:
        """Return whether a name belongs to a model with weights."""
        directory = self.directory
        return any(name in model.names for model in self.always) or (
            directory is not None and directory.files(name) is not None
        )

    def has_adapter(self, name: str) -> bool:
        """Return whether an adapter of any owner has a name."""
        engines = (model.engine for model in self.models)
        return any(one.name == name for engine in engines for one in engine.list_lora_adapters())

    def known_names(self, owner: str) -> list[str]:
        """Return all names that a key may use."""
        names = [name for model in self.always for name in (*model.names, *model.adapters(owner))]
        if self.directory is not None:
            names += [name for name in self.directory.names() if name not in names]
        if self.definitions is not None:
            names += self.definitions.known
        return names

    def _unknown(self, name: str, owner: str) -> APIError:
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
            owner: owner of the request, see `owner_of`. Adapters of other keys are not found.

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
        raise self._unknown(name, owner)

    def cards(self, owner: str) -> list[dict[str, Any]]:
        """Return the entries of `/v1/models`: the names of each model, then its adapters.

        Args:
            owner: see `owner_of`. The adapters of other keys are omitted.
        """
        cards = []
        for model in self.always:
            cards += [model.card(name) for name in model.names]
            for adapter in model.adapters(owner).values():
                root = adapter.source or adapter.name
                cards.append({**model.card(adapter.name), "root": root, "parent": model.name})
        listed_names = {card["id"] for card in cards}
        for name in self.known_names(owner):
            if name not in listed_names:
                try:
                    cards.append(self._card_on_demand(name))
                except (EasyDeLError, OSError, ValueError) as error:
                    # The files changed, or are damaged. The other models are listed.
                    logger.warning("the model %s is not listed: %s", name, error)
        return cards

    def _card_on_demand(self, name: str) -> dict[str, Any]:
        """Return the entry of a model that is loaded on demand, or of a derived model."""
        card = {"id": name, "object": "model", "owned_by": "ed-esurge"}
        definition = self.definitions.known.get(name) if self.definitions is not None else None
        if definition is not None:
            times = {"created": int(definition.created)}
            source = definition.source
            return {**card, **times, "root": source, "parent": source, "max_model_len": None}
        assert self.directory is not None, "the name is a name of the directory"
        if name in self.directory.loaded:
            return self.directory.loaded[name].model.card(name)
        files = self.directory.files(name)
        if files is None:
            raise CheckpointError(f"the folder of {name} contains no model: copy it again")
        length = self.directory.length(files)
        times = {"created": int(files.modified)}
        fields = {**times, "root": name, "parent": None, "max_model_len": length}
        return {**card, **fields, **build_certificate_fields(certificate_summary(files.path))}
