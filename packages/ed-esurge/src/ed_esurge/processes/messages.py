"""Parts of the messages between a server and its replicas: facts about an engine, and errors."""

from __future__ import annotations

from typing import Any

from ed_infra.enums import TaskType
from ed_infra.errors import CheckpointError, ConfigError, EasyDeLError
from ed_models.checkpoints.embedding_settings import EmbeddingSettings
from ed_models.modalities.audio import RecordingForm
from pydantic import ValidationError

from ed_esurge.config import SamplingDefaults
from ed_esurge.engine.facts import EngineFacts
from ed_esurge.engine.intake import ContextLengthError, TokenIdError
from ed_esurge.outputs import LabelSet
from ed_esurge.processes.answer_check import (
    MAX_TEXT,
    ReplicaMessageError,
    is_count,
    is_text,
    require,
)

#: Maximum number of messages that are sent together, and maximum bytes of those of a replica.
MAX_MESSAGES, MAX_MESSAGE_BYTES = 1024, 2**28
#: Environment variable with the token of a process that the server started.
TOKEN = "ESURGE_REPLICA_TOKEN"


def encode_facts(facts: EngineFacts) -> dict[str, Any]:
    """Return the facts about an engine as values that `ed_esurge.engine.wire` encodes."""
    form = facts.recording_form
    return {
        **vars(facts),
        "task": facts.task.value,
        "recording_form": form and tuple(form),
        "sampling_defaults": facts.sampling_defaults.values,
    }


def decode_facts(values: Any) -> EngineFacts:
    """Return the facts of `encode_facts`.

    Raises:
        ReplicaMessageError: a value is missing, or no engine has the value.
    """
    names = EngineFacts.__dataclass_fields__
    require(isinstance(values, dict) and values.keys() == names.keys(), "facts with other names")
    tasks = [task.value for task in TaskType]
    require(isinstance(values["task"], str) and values["task"] in tasks, "an unknown task")
    form = values["recording_form"]
    if form is not None:
        require(isinstance(form, tuple) and len(form) == len(RecordingForm._fields), "a wrong form")
        form = RecordingForm(*form)
    try:
        defaults = SamplingDefaults.model_validate(values["sampling_defaults"])
    except ValidationError:
        raise ReplicaMessageError("wrong sampling defaults") from None
    decoded = {"task": TaskType(values["task"]), "recording_form": form}
    facts = EngineFacts(**{**values, **decoded, "sampling_defaults": defaults})
    _check_facts(facts)
    return facts


def _check_facts(facts: EngineFacts) -> None:
    require(is_text(facts.model_name, 1024), "a wrong name of the model")
    for size in (facts.max_model_len, facts.vocab_size):
        require(is_count(size, 2**31) and size > 0, "a wrong length or vocabulary")
    ends = facts.eos_token_ids
    require(isinstance(ends, tuple) and len(ends) <= 2**12, "wrong end tokens")
    require(all(is_count(token, facts.vocab_size - 1) for token in ends), "wrong end tokens")
    inputs = facts.input_names
    require(isinstance(inputs, tuple) and len(inputs) <= 64, "wrong inputs")
    require(all(is_text(name, 256) for name in inputs), "wrong inputs")
    labels = facts.labels
    require(labels is None or isinstance(labels, LabelSet), "wrong labels")
    if labels is not None:
        require(isinstance(labels.names, tuple), "wrong labels")
        named = all(name is None or is_text(name, 4096) for name in labels.names)
        require(named and labels.score_activation in ("identity", "sigmoid"), "wrong labels")
        require(labels.problem_type is None or is_text(labels.problem_type, 256), "wrong labels")
    settings = facts.embedding_settings
    require(settings is None or isinstance(settings, EmbeddingSettings), "wrong settings")
    if settings is not None:
        texts = (settings.model_json, settings.transformer_json)
        require(all(is_text(text) for text in texts), "wrong settings")
        most = settings.max_seq_length
        require(most is None or is_count(most, 2**31), "wrong settings")
        require(isinstance(settings.include_prompt, bool), "wrong settings")
    certificate = facts.certificate
    require(certificate is None or isinstance(certificate, dict), "a wrong certificate")


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


def encode_error(error: BaseException) -> dict[str, Any]:
    """Return an error as plain values. A long text is cut."""
    kind = next(
        (name for name, error_class in _KINDS.items() if isinstance(error, error_class)), None
    )
    if kind is None:
        return {"kind": "error", "text": repr(error)[:MAX_TEXT]}
    values = [getattr(error, name) for name in _ATTRIBUTES.get(kind, ())]
    return {"kind": kind, "text": str(error)[:MAX_TEXT], "values": values}


def decode_error(values: Any) -> EasyDeLError:
    """Return the error of `encode_error`.

    Raises:
        ReplicaMessageError: the values are not those of an error.
    """
    require(
        isinstance(values, dict) and values.get("kind") in _KINDS, "an error of an unknown kind"
    )
    kind, text, more = values["kind"], values.get("text", ""), values.get("values", [])
    require(is_text(text) and isinstance(more, list), "an error without a text")
    if kind in _ATTRIBUTES:
        require(len(more) == len(_ATTRIBUTES[kind]), "an error with missing values")
        numbers = all(
            attribute is None or is_count(attribute, 2**53) or is_text(attribute, 256)
            for attribute in more
        )
        require(numbers, "an error with wrong values")
    if kind == "token_id":
        field, token, vocab_size = more
        require(is_text(field) and type(token) is int and type(vocab_size) is int, "wrong values")
        return TokenIdError(field, token, vocab_size)
    if kind == "context_length":
        prompt_tokens, max_tokens, max_model_len = more
        require(type(prompt_tokens) is int and type(max_model_len) is int, "wrong values")
        return ContextLengthError(text, prompt_tokens, max_tokens, max_model_len)
    return _KINDS[kind](text)
