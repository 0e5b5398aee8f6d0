"""Models that clients derive from other models: a system prompt, first messages and defaults of
sampling options. A definition is a JSON file, and no weights are copied."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, unquote

from ed_infra.errors import ConfigError
from ed_infra.options import Options
from pydantic import Field, ValidationError

from ed_esurge.frontends.library.parameters import chat_fields
from ed_esurge.server.generation.models import ServedModel
from ed_esurge.server.generation.requests import ChatMessage, ChatRequest

#: Maximum number of definitions, of their sources in a chain, and of the bytes of one file.
MAX_DEFINITIONS, MAX_CHAIN, MAX_BYTES = 1024, 16, 2**20
SUFFIX = ".model.json"

#: Name of a model of a client, also used as a name of a file.
ModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}$")]


class ModelDefinition(Options):
    """A derived model.

    Attributes:
        source: name of the model that answers.
        messages: messages before those of a request, after the system prompt.
        parameters: defaults of sampling options, in Ollama's spelling.
        created: seconds since 1970.
    """

    source: str
    system: str | None = None
    messages: list[dict[str, Any]] = Field(default_factory=list)
    parameters: dict[str, Any] = Field(default_factory=dict)
    license: list[str] = Field(default_factory=list)
    created: float = Field(default_factory=time.time)

    def over(self, parent: ModelDefinition) -> ModelDefinition:
        """Return this definition with the values of its parent where this definition has none."""
        return self.model_copy(
            update={
                "source": parent.source,
                "system": self.system if self.system is not None else parent.system,
                "messages": self.messages or parent.messages,
                "parameters": {**parent.parameters, **self.parameters},
                "license": self.license or parent.license,
            }
        )

    @property
    def digest(self) -> str:
        """SHA-256 of the definition."""
        content = json.dumps(self.model_dump(exclude={"created"}), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


class DefinitionStore:
    """The definitions in a directory, one file each.

    Args:
        folder: created with the first definition.

    Raises:
        ConfigError: a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, ModelDefinition] = {}
        for file in sorted(folder.glob(f"*{SUFFIX}"))[:MAX_DEFINITIONS]:
            try:
                definition = ModelDefinition.model_validate_json(file.read_bytes())
            except (OSError, ValidationError) as error:
                raise ConfigError(
                    f"the model definition {file} cannot be read: {error}; remove the file"
                ) from None
            self._known[unquote(file.name.removesuffix(SUFFIX))] = definition

    def __contains__(self, name: str) -> bool:
        return name in self._known

    @property
    def known(self) -> Mapping[str, ModelDefinition]:
        """The definitions by name."""
        return self._known

    def add(self, name: str, definition: ModelDefinition) -> None:
        """Store a definition, which replaces a definition with the same name.

        Raises:
            ConfigError: there are too many definitions, or the definition is too long.
        """
        content = definition.model_dump_json().encode()
        if len(content) > MAX_BYTES:
            raise ConfigError(
                f"the definition has {len(content)} bytes, and the limit is {MAX_BYTES}: shorten "
                "its messages"
            )
        if name not in self._known and len(self._known) >= MAX_DEFINITIONS:
            raise ConfigError(
                f"there are {MAX_DEFINITIONS} models of clients, the limit: delete one first"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._file(name)
        partial = file.with_suffix(".partial")
        partial.write_bytes(content)
        os.replace(partial, file)
        self._known[name] = definition

    def remove(self, name: str) -> None:
        """Remove a definition."""
        self._file(name).unlink(missing_ok=True)
        del self._known[name]

    def _file(self, name: str) -> Path:
        return self._folder / f"{quote(name, safe='')}{SUFFIX}"

    def resolve(self, name: str, exists: Callable[[str], bool]) -> ModelDefinition:
        """Return the definition of a model, with the values of its sources.

        Args:
            exists: returns whether a model with weights has a name.

        Raises:
            ConfigError: a source does not exist, or the sources form a circle.
        """
        result = self._known[name]
        for _ in range(MAX_CHAIN):
            source = result.source
            if exists(source):
                return result
            if source not in self._known:
                raise ConfigError(
                    f"the model {name!r} is derived from {source!r}, which does not exist: create "
                    "the model again with another source"
                )
            result = result.over(self._known[source])
        raise ConfigError(f"the sources of the model {name!r} form a circle: delete the model")


@dataclass(frozen=True)
class Derivation:
    """Adds the first messages and the sampling options of a derived model to chat requests.

    A system message and the options of a request have precedence.

    Attributes:
        messages_only: whether the requests already have the sampling options.
    """

    definition: ModelDefinition
    messages_only: bool = False

    def __call__(self, body: ChatRequest) -> ChatRequest:
        definition = self.definition
        values = {} if self.messages_only else chat_fields(definition.parameters)
        values = {k: value for k, value in values.items() if k not in body.model_fields_set}
        if "max_completion_tokens" in body.model_fields_set:
            values.pop("max_tokens", None)
        first = list(definition.messages)
        has_system_message = body.messages[0].role in ("system", "developer")
        if definition.system is not None and not has_system_message:
            first.insert(0, {"role": "system", "content": definition.system})
        messages = [ChatMessage.model_validate(message) for message in first]
        start = 1 if has_system_message else 0
        messages = [*body.messages[:start], *messages, *body.messages[start:]]
        return body.model_copy(update={**values, "messages": messages})


def get_definition(model: ServedModel) -> ModelDefinition | None:
    """Return the definition of a derived model; None for other models."""
    return model.derivation.definition if isinstance(model.derivation, Derivation) else None


def add_only_messages(model: ServedModel) -> ServedModel:
    """Return a model for requests that already have the sampling options of a derived model."""
    if not isinstance(model.derivation, Derivation):
        return model
    twin = copy.copy(model)
    twin.derivation = replace(model.derivation, messages_only=True)
    return twin
