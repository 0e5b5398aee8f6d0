"""Facts about models in Ollama's format: size, digest, details."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from ed_infra.errors import EasyDeLError

from ed_esurge.frontends.library.checkpoint_files import CheckpointCache, CheckpointFiles, size_name
from ed_esurge.frontends.library.definitions import ModelDefinition
from ed_esurge.frontends.library.loading import get_library, measure_memory
from ed_esurge.server.generation.answers import AnswerBody
from ed_esurge.server.generation.models import ServedModel
from ed_esurge.server.generation.served_models import ServedModels
from ed_esurge.server.http.errors import APIError


class ModelDetails(AnswerBody):
    """Details of a model."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


logger = logging.getLogger(__name__)

# Server -> the files of its models of the start.
_CHECKPOINTS: WeakKeyDictionary[ServedModels, CheckpointCache] = WeakKeyDictionary()


@dataclass(frozen=True)
class ListedModel:
    """The facts about one name.

    Attributes:
        name: name of the model.
        model: the model in memory; None = the model is not loaded.
        files: the checkpoint; None = the server does not know the files.
        definition: the definition of a derived model with the values of its sources.
    """

    name: str
    model: ServedModel | None
    files: CheckpointFiles | None
    definition: ModelDefinition | None

    @classmethod
    def of(cls, server: ServedModels, name: str, owner: str) -> ListedModel:
        """Return the facts about a name.

        Raises:
            APIError: 404, the model does not exist.
        """
        library = get_library(server)
        definition = library.definition(name) if library is not None else None
        base = name if definition is None else definition.source
        files = library.directory.files(base) if library is not None else None
        model = next((one for one in server.models if base in one.names), None)
        if model is None and files is None:
            model = server.find(base, owner)  # an adapter, or the error
        if files is None and model is not None and model.lora_name is None:
            files = _get_checkpoint_files(server, model)
        return cls(name, model, files, definition)

    @property
    def size(self) -> int:
        """Bytes of the files; without known files, bytes in memory."""
        if self.files is not None:
            return self.files.size
        return 0 if self.model is None else measure_memory(self.model.engine)

    @property
    def modified(self) -> float:
        """Time of the last change, in seconds since 1970."""
        if self.definition is not None:
            return self.definition.created
        if self.files is not None:
            return self.files.modified
        return float(self.model.created) if self.model is not None else 0.0

    @property
    def digest(self) -> str:
        """SHA-256 of the facts that identify the model; see `CheckpointFiles.digest`."""
        parts = [self.files.digest if self.files is not None else self.name]
        if self.definition is not None:
            parts.append(self.definition.digest)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def details(self) -> dict[str, Any]:
        """Return `details`. Unknown facts are empty."""
        files = self.files
        family = files.family if files is not None else ""
        return {
            "parent_model": self.definition.source if self.definition is not None else "",
            "format": "safetensors" if files is not None else "",
            "family": family,
            "families": [family] if family else [],
            "parameter_size": size_name(files.parameters) if files is not None else "",
            "quantization_level": files.quantization if files is not None else "",
        }


def _get_checkpoint_files(server: ServedModels, model: ServedModel) -> CheckpointFiles | None:
    """Return the checkpoint of a model that was loaded at the start, if its files are known."""
    directory = getattr(model.engine, "directory", None)
    if directory is None:
        return None
    checkpoints = _CHECKPOINTS.setdefault(server, CheckpointCache(len(server.always)))
    return checkpoints.get(Path(directory))


def list_models(server: ServedModels, owner: str) -> list[ListedModel]:
    """Return the facts about every name that a key may use. A derived model without its source,
    and a model with damaged files, are omitted."""
    models = []
    for name in server.known_names(owner):
        try:
            model = ListedModel.of(server, name, owner)
            if model.files is not None:
                model.files.check()
            models.append(model)
        except APIError:
            continue
        except (EasyDeLError, OSError) as error:
            logger.warning("the model %s is not listed: %s", name, error)
    return models
