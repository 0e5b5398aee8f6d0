"""Abilities of served models, and the error of a request for an ability that the model lacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ed_infra.enums import TaskType

from ed_esurge.outputs import LabelSet
from ed_esurge.server.http.errors import APIError

#: Tasks of models that generate no tokens, and the routes that serve them.
ROUTES_OF_ENCODERS = {
    TaskType.EMBEDDING: "/v1/embeddings",
    TaskType.SEQUENCE_CLASSIFICATION: "/classify",
}
#: Tasks of models that read audio.
SPEECH_TASKS = (TaskType.SPEECH_SEQUENCE_TO_SEQUENCE, TaskType.CTC)
#: Most models that an error names.
MOST_NAMED = 8


class Model(Protocol):
    """The facts of a `ServedModel` that decide its abilities."""

    name: str
    names: tuple[str, ...]
    engine: Any
    state: Any
    """Its `all_models` returns all models of the server."""

    @property
    def task(self) -> TaskType:
        """The task of the model."""
        ...

    @property
    def labels(self) -> LabelSet | None:
        """The labels of a classifier; None for other models."""
        ...


@dataclass(frozen=True)
class EndpointAbility:
    """An ability of models.

    Attributes:
        verb: the verb and its object for errors, such as "generates tokens".
        has: returns whether a model has the ability.
    """

    verb: str
    has: Callable[[Model], bool]


def _reads_text(model: Model) -> bool:
    return model.task not in SPEECH_TASKS


def _embeds(model: Model) -> bool:
    without = (TaskType.SEQUENCE_CLASSIFICATION, TaskType.SEQUENCE_TO_SEQUENCE)
    return _reads_text(model) and model.task not in without


def _ranks(model: Model) -> bool:
    labels = model.labels
    return _embeds(model) or (labels is not None and len(labels.names) == 1)


GENERATES = EndpointAbility(
    "generates tokens", lambda model: _reads_text(model) and model.task not in ROUTES_OF_ENCODERS
)
EMBEDS = EndpointAbility("returns embeddings", _embeds)
CLASSIFIES = EndpointAbility("classifies texts", lambda model: model.labels is not None)
RANKS = EndpointAbility("scores pairs of texts", _ranks)
POOLS = EndpointAbility("pools texts", lambda model: _embeds(model) or model.labels is not None)
EMBEDS_TOKENS = EndpointAbility(
    "returns embeddings of tokens", lambda model: model.task == TaskType.EMBEDDING
)
TRANSCRIBES = EndpointAbility("reads audio", lambda model: hasattr(model.engine, "transcribe"))
ABILITIES = (GENERATES, EMBEDS, CLASSIFIES, RANKS, POOLS, EMBEDS_TOKENS, TRANSCRIBES)


def describe_route(model: Model) -> str:
    """Return the advice for a request to an endpoint that the model does not serve."""
    if model.task in SPEECH_TASKS:
        return "it reads audio, send files to /v1/audio/transcriptions"
    route = ROUTES_OF_ENCODERS.get(model.task)
    if route is not None:
        return f"it generates no tokens, send the texts to {route}"
    return "it generates tokens, send the texts to /v1/completions or /v1/chat/completions"


def require_ability(model: Model, ability: EndpointAbility, reason: str | None = None) -> None:
    """Check that a model has an ability.

    Args:
        reason: why the model cannot answer, and what to do; by default, the route of the model.

    Raises:
        APIError: 400 `unsupported_task`, which names the models of the server with the ability.
    """
    if not ability.has(model):
        raise unsupported_task(model, ability, reason)


def unsupported_task(model: Model, ability: EndpointAbility, reason: str | None = None) -> APIError:
    """Return the error of `require_ability`."""
    models: Sequence[Model] = model.state.all_models()
    able = [repr(candidate.names[0]) for candidate in models if ability.has(candidate)]
    if not able:
        choice = f"no model of this server {ability.verb}"
    elif len(able) == 1:
        choice = f"the model of this server that {ability.verb} is {able[0]}"
    else:
        more = ", …" if len(able) > MOST_NAMED else ""
        choice = f"a model of this server that {ability.verb} is one of "
        choice += ", ".join(able[:MOST_NAMED]) + more
    return APIError(
        f"the model {model.name!r} has the task {model.task.value!r}: "
        f"{reason or describe_route(model)}; "
        f"{choice}",
        param="model",
        code="unsupported_task",
    )
