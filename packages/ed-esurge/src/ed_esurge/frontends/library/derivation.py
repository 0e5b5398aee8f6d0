"""Requests to derived models: the first messages and the sampling options of a definition."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

from ed_esurge.frontends.library.definitions import ModelDefinition
from ed_esurge.frontends.library.parameters import chat_fields
from ed_esurge.server.generation.models import ServedModel
from ed_esurge.server.generation.requests import ChatMessage, ChatRequest


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
