"""Validation of the configuration and the tokenizer of a checkpoint, before weights are loaded.

The checks read only small files and open no weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ed_infra import registry
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.config.files import accept_easydel_values
from ed_infra.enums import TaskType
from ed_infra.errors import CheckpointError
from ed_infra.logging import get_logger, once

from ed_models.checkpoints.text_halves import (
    CONDITIONAL,
    TASK_ENDINGS,
    specialize_task,
    text_settings,
)

#: The file of sentence-transformers that lists the modules of an embedding model.
MODULES_NAME = "modules.json"
#: The settings of a model of sentence-transformers.
SENTENCE_NAME = "config_sentence_transformers.json"
#: The settings of an adapter in PEFT's layout.
ADAPTER_NAME = "adapter_config.json"
logger = get_logger(__name__)
_MAX_CONFIG = 2**24  # bytes
_MAX_TOKENIZER = 2**28  # bytes
#: Optional fields of a configuration that must be at least 1.
_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
#: Numbers that JSON lacks; `transformers` writes them as `{"__float__": "Infinity"}`.
_NOT_FINITE = ("Infinity", "-Infinity", "NaN")


def _number(item: dict[str, Any]) -> Any:
    """Return the number that `transformers` writes as an object, such as an infinite time step."""
    is_number = item.keys() == {"__float__"} and item["__float__"] in _NOT_FINITE
    return float(item["__float__"]) if is_number else item


def read_checkpoint_settings(path: Path, task: TaskType | None = None) -> Mapping[str, Any]:
    """Read config.json; of a multimodal checkpoint, the settings of its text half.

    Args:
        path: the file.
        task: see `text_settings`.

    Raises:
        CheckpointError: the file is missing, too large, or not a JSON object, or a multimodal
            checkpoint has no `text_config`.
    """
    if not path.is_file():
        if (path.parent / ADAPTER_NAME).is_file():
            raise CheckpointError(
                f"{path.parent} holds an adapter, and no model: load the model that it was made "
                "for, and then ed_models.adapters.peft.load_adapter(model, directory)"
            )
        raise CheckpointError(f"{path.parent} has no {path.name}, so it holds no model")
    if path.stat().st_size > _MAX_CONFIG:
        raise CheckpointError(
            f"{path} is larger than {_MAX_CONFIG} bytes; that is no settings file"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_hook=_number)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a JSON object ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object but a {type(content).__name__}")
    return text_settings(accept_easydel_values(content, str(path)), path, task)


def read_cross_encoder(directory: Path) -> Mapping[str, Any] | None:
    """Return the settings of a cross-encoder of sentence-transformers 6; None for other files.

    Earlier versions store the settings in config.json.
    """
    path = directory / SENTENCE_NAME
    if not path.is_file() or path.stat().st_size > _MAX_CONFIG:
        return None
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return None
    is_pair = isinstance(stored, dict) and stored.get("model_type") == "CrossEncoder"
    return stored if is_pair else None


def detect_task(directory: Path) -> TaskType:
    """Return the task of a checkpoint.

    A checkpoint with the files of sentence-transformers is an embedding model. Otherwise the class
    in `architectures` of config.json determines the task. The default is a causal language model.

    Raises:
        CheckpointError: the class belongs to an unsupported task.
    """
    if (directory / MODULES_NAME).is_file():
        is_pair = read_cross_encoder(directory) is not None
        return TaskType.SEQUENCE_CLASSIFICATION if is_pair else TaskType.EMBEDDING
    path = directory / "config.json"
    settings = read_checkpoint_settings(path)
    names = settings.get("architectures") or []
    if not names:
        return TaskType.CAUSAL_LM
    for name in map(str, names):
        if name.endswith(CONDITIONAL):
            tasks = registry.list_tasks(str(settings.get("model_type")))
            if tasks:
                return tasks[0]
        for ending, task in TASK_ENDINGS.items():
            if name.endswith(ending):
                if task == TaskType.BASE_MODULE:
                    settings = read_checkpoint_settings(
                        path, TaskType.ZERO_SHOT_IMAGE_CLASSIFICATION
                    )
                return specialize_task(task, registry_tasks(str(settings.get("model_type"))))
    raise CheckpointError(
        f"the task of {path} is unknown: its class is {', '.join(map(str, names))}, but "
        f"'auto-bind' knows the endings {', '.join([*TASK_ENDINGS, CONDITIONAL])}. Set the task"
    )


def registry_tasks(model_type: str) -> Sequence[TaskType]:
    """Return the tasks of a model type; none for an unknown type."""
    return registry.list_tasks(model_type) if model_type in registry.model_types() else ()


def check_config(path: Path, stored: Mapping[str, Any], config: EasyDeLBaseConfig) -> None:
    """Check the fields of a configuration and their consistency.

    Args:
        path: path of the file, for error messages.
        stored: content of the file.
        config: the configuration created from the file.

    Raises:
        CheckpointError: a count is not positive, or two fields contradict each other.
    """
    wrong = []
    for name in _COUNTS:
        value = _field(config, name)
        if isinstance(value, int) and value < 1:
            wrong.append(f"{name} is {value}, and must be at least 1")
    heads, keys = (_field(config, n) for n in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(keys, int) and not wrong and heads % keys:
        wrong.append(f"num_attention_heads {heads} is no multiple of num_key_value_heads {keys}")
    labels, count = stored.get("id2label"), stored.get("num_labels")
    if isinstance(labels, dict) and isinstance(count, int) and len(labels) != count:
        wrong.append(f"num_labels is {count}, and id2label has {len(labels)} labels")
    if wrong:
        raise CheckpointError(f"{path} contradicts itself: {'; '.join(wrong)}")


def _field(config: EasyDeLBaseConfig, name: str) -> object:
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers raises it for a per-layer value
        return None


def check_tokenizer(directory: Path, vocab_size: int | None) -> None:
    """Check that the token ids of a checkpoint's tokenizer are within the model's vocabulary.

    Added tokens beyond the vocabulary are only logged, once: ordinary text does not produce them,
    and some published models have them (Gemma 3's `<image_soft_token>`).

    Raises:
        CheckpointError: tokens of ordinary text are beyond the vocabulary.
    """
    path = directory / "tokenizer.json"
    if vocab_size is None or not path.is_file():
        return
    if path.stat().st_size > _MAX_TOKENIZER:
        raise CheckpointError(f"{path} is larger than {_MAX_TOKENIZER} bytes; that is no tokenizer")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        vocab = content["model"].get("vocab") or ()
        ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
        largest = max(ids, default=-1)
        added = [token["id"] for token in content.get("added_tokens") or ()]
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise CheckpointError(
            f"{path} is no tokenizer ({error!r}); delete or replace it"
        ) from error
    if largest >= vocab_size:
        raise CheckpointError(
            f"{path} has token ids up to {largest}, and the model a vocabulary of {vocab_size}: "
            "they are of different models; put the model's own tokenizer there"
        )
    invalid_tokens = sorted(token for token in added if token >= vocab_size)
    if invalid_tokens:
        once(
            logger,
            f"{path}: added tokens {invalid_tokens[:5]} are beyond the model's vocabulary of "
            f"{vocab_size}: "
            "the model cannot be given them",
        )
