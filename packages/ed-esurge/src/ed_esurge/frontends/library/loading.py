"""The library: models of a directory, which are loaded on demand, and derived models."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ed_infra.errors import CheckpointError, ConfigError, EasyDeLError

from ed_esurge.certificates import certificate_summary
from ed_esurge.frontends.library.checkpoint_files import CheckpointFiles
from ed_esurge.frontends.library.definitions import DefinitionStore, Derivation, ModelDefinition
from ed_esurge.frontends.library.directory import ModelDirectory
from ed_esurge.server.generation.models import ServedModel, build_certificate_fields
from ed_esurge.server.generation.served_models import ServedModels
from ed_esurge.server.http.errors import APIError, hide_paths

#: Folder of the definitions of derived models, within the directory of models.
DEFINITIONS = ".definitions"


@dataclass(frozen=True)
class ModelLoading:
    """Options of a directory of models.

    Attributes:
        folder: see `ModelDirectory`.
        load: creates the engine of a checkpoint; called in a thread.
        estimate: see `ModelDirectory`.
        memory: see `ModelDirectory`.
        keep_alive: see `ModelDirectory`.
        max_model_len: see `ModelDirectory`.
    """

    folder: Path
    load: Callable[[Path], Any]
    estimate: Callable[[CheckpointFiles], int]
    memory: int | None = None
    keep_alive: float = 300.0
    max_model_len: int | None = None

    def open(self, server: ServedModels, serve: Callable[[Any, str], ServedModel]) -> ModelLibrary:
        """Return the library of a server; see `ModelLibrary`."""
        return ModelLibrary(self, server, serve)


class ModelLibrary:
    """The models of a directory and derived models. Implements `FurtherModels` of a server.

    Args:
        serve: returns the served model of an engine, with a name.

    Attributes:
        directory: the models that are loaded on demand.
        definitions: the models that clients derive.
    """

    def __init__(
        self, loading: ModelLoading, server: ServedModels, serve: Callable[[Any, str], ServedModel]
    ) -> None:
        self._loading, self._server, self._serve = loading, server, serve
        self.directory: ModelDirectory[ServedModel] = ModelDirectory(
            loading.folder,
            load=self._load,
            unload=self._unload,
            estimate=loading.estimate,
            memory=loading.memory,
            keep_alive=loading.keep_alive,
            max_model_len=loading.max_model_len,
        )
        self.definitions = DefinitionStore(loading.folder / DEFINITIONS)

    async def _load(self, name: str, files: CheckpointFiles) -> tuple[ServedModel, int]:
        def work() -> ServedModel:
            return self._serve(self._loading.load(files.path), name)

        model = await asyncio.to_thread(work)
        model.activity = self.directory.activity()
        start = getattr(model.engine, "start", None)
        if start is not None:
            start()
        return model, measure_memory(model.engine)

    async def _unload(self, model: ServedModel) -> None:
        self._server.metrics.forget(model.names[0])
        await release_engine(model.engine)

    @asynccontextmanager
    async def run(self) -> AsyncGenerator[None]:
        """Unload idle models during the block, and all models after the block."""
        sweeping = asyncio.create_task(self.directory.sweep())
        try:
            yield
        finally:
            sweeping.cancel()
            await self.directory.close()

    @property
    def models(self) -> list[ServedModel]:
        """The models in memory."""
        return [loaded.model for loaded in self.directory.loaded.values()]

    def __contains__(self, name: str) -> bool:
        return name in self.definitions or self.directory.files(name) is not None

    def names(self) -> list[str]:
        """Return the names of the directory and of derived models."""
        return [*self.directory.names(), *self.definitions.known]

    @asynccontextmanager
    async def lease(self, name: str, owner: str) -> AsyncGenerator[ServedModel]:
        """Yield a model for a request, after loading; see `ServedModels.using`."""
        definition = self.definition(name)
        async with self._lease_source(definition.source if definition else name, owner) as model:
            if definition is not None:
                model.name, model.derivation = name, Derivation(definition)
            yield model

    @asynccontextmanager
    async def _lease_source(self, name: str, owner: str) -> AsyncGenerator[ServedModel]:
        server, directory = self._server, self.directory
        if any(name in model.names or name in model.adapters(owner) for model in server.always):
            yield server.find(name, owner)
            return
        if directory.files(name) is None:
            raise server.unknown_model(name, owner)
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(server.state.limits.request_timeout):
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

    def definition(self, name: str) -> ModelDefinition | None:
        """Return the definition of a derived model; None for other names.

        Raises:
            APIError: 404, a source of the model does not exist.
        """
        if name not in self.definitions:
            return None
        try:
            return self.definitions.resolve(name, lambda source: has_weights(self._server, source))
        except ConfigError as error:
            raise APIError(str(error), status=404, param="model", code="model_not_found") from None

    def card(self, name: str) -> dict[str, Any]:
        """Return the entry of `/v1/models` for a name.

        Raises:
            EasyDeLError, OSError, ValueError: the files changed, or are damaged.
        """
        card = {"id": name, "object": "model", "owned_by": "ed-esurge"}
        definition = self.definitions.known.get(name)
        if definition is not None:
            times = {"created": int(definition.created)}
            source = definition.source
            return {**card, **times, "root": source, "parent": source, "max_model_len": None}
        if name in self.directory.loaded:
            return self.directory.loaded[name].model.card(name)
        files = self.directory.files(name)
        if files is None:
            raise CheckpointError(f"the folder of {name} contains no model: copy it again")
        length = self.directory.length(files)
        times = {"created": int(files.modified)}
        fields = {**times, "root": name, "parent": None, "max_model_len": length}
        return {**card, **fields, **build_certificate_fields(certificate_summary(files.path))}


def get_library(server: ServedModels) -> ModelLibrary | None:
    """Return the library of a server; None = the server has only the models of the start."""
    library = server.further
    return library if isinstance(library, ModelLibrary) else None


def has_weights(server: ServedModels, name: str) -> bool:
    """Return whether a name belongs to a model with weights."""
    library = get_library(server)
    return any(name in model.names for model in server.always) or (
        library is not None and library.directory.files(name) is not None
    )


def measure_memory(engine: object) -> int:
    """Return the bytes of an engine's weights and pages; 0 for an engine without arrays."""
    bare = getattr(engine, "engine", engine)
    measure = getattr(bare, "memory_bytes", None)
    return 0 if measure is None else measure()


def on_accelerator(engine: object) -> bool:
    """Return whether the arrays of an engine are in the memory of accelerators."""
    bare = getattr(engine, "engine", engine)
    return getattr(bare, "platform", "cpu") != "cpu"


async def release_engine(engine: object) -> None:
    """Stop an engine and its compilation of programs, and free its weights and pages."""

    def work() -> None:
        shutdown = getattr(engine, "shutdown", None)
        if shutdown is not None:
            shutdown()
        drop = getattr(getattr(engine, "engine", engine), "drop_memory", None)
        if drop is not None:  # frees the arrays without a collection, which lasts 0.3 s
            drop()
        else:
            gc.collect()

    await asyncio.to_thread(work)
