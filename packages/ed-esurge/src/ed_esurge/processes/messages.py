"""Parts of the messages between a server and its replicas: facts about an engine, and errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ed_infra.enums import TaskType
from ed_infra.errors import CheckpointError, ConfigError, EasyDeLError
from ed_models.checkpoints.embedding_settings import EmbeddingSettings
from ed_models.tasks.audio_text import RecordingForm

from ed_esurge.engine.intake import ContextLengthError, TokenIdError
from ed_esurge.outputs import LabelSet


@dataclass(frozen=True)
class EngineFacts:
    """The properties of an engine that a server needs, see `ServedEngine`."""

    model_name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    input_names: tuple[str, ...]
    task: TaskType
    labels: LabelSet | None
    embedding_settings: EmbeddingSettings | None
    recording_form: RecordingForm | None
    certificate: Mapping[str, Any] | None

    @classmethod
    def of(cls, engine: Any) -> EngineFacts:
        """Return the facts about an `AsyncEngine`."""
        return cls(**{name: getattr(engine, name) for name in cls.__dataclass_fields__})

    def plain(self) -> dict[str, Any]:
        """Return the facts as values that `ed_esurge.engine.wire` encodes."""
        form = self.recording_form
        return {**vars(self), "task": self.task.value, "recording_form": form and tuple(form)}

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> EngineFacts:
        """Return the facts of `plain`."""
        form = values["recording_form"]
        own = {"task": TaskType(values["task"]), "recording_form": form and RecordingForm(*form)}
        return cls(**{**values, **own})


#: Kinds of errors, each a subclass of the next.
_KINDS: dict[str, type[EasyDeLError]] = {
    "token_id": TokenIdError,
    "context_length": ContextLengthError,
    "config": ConfigError,
    "checkpoint": CheckpointError,
    "error": EasyDeLError,
}
#: Attributes that create an error again.
_ATTRIBUTES = {
    "token_id": ("field", "token", "vocab_size"),
    "context_length": ("prompt_tokens", "max_tokens", "max_model_len"),
}


def described(error: BaseException) -> dict[str, Any]:
    """Return an error as plain values."""
    kind = next((name for name, each in _KINDS.items() if isinstance(error, each)), None)
    if kind is None:
        return {"kind": "error", "text": repr(error)}
    values = [getattr(error, name) for name in _ATTRIBUTES.get(kind, ())]
    return {"kind": kind, "text": str(error), "values": values}


def error_of(values: Mapping[str, Any]) -> EasyDeLError:
    """Return the error of `described`."""
    kind, text, more = values["kind"], values["text"], values.get("values", ())
    if kind == "token_id":
        return TokenIdError(*more)
    if kind == "context_length":
        return ContextLengthError(text, *more)
    return _KINDS[kind](text)
