"""The text halves of multimodal checkpoints: the settings and the tensors of the language model.

`config.json` of such a checkpoint contains the configuration of the language model as
`text_config`. The tensors of the language model have a prefix, which depends on the writer:
`language_model.model.layers.…` and `language_model.lm_head.…`, or `model.language_model.layers.…`
and `lm_head.…`. Without these prefixes, the names are those of a text-only checkpoint.

A further multimodal model is one entry of `MODEL_TYPES`. This module imports neither jax nor
transformers, because run files are checked with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ed_infra.enums import TaskType
from ed_infra.errors import CheckpointError
from ed_infra.logging import get_logger, once
from ed_infra.package_files import find_package_file, is_package_address
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

if TYPE_CHECKING:
    from ed_models.checkpoints.tensor_files import TensorFiles

logger = get_logger(__name__)

#: Multimodal model types whose checkpoints are loaded as the model type of their `text_config`, for
#: tasks without images or if no family has the whole model. Their numbers for tokens without images
#: are those of the text model alone.
MODEL_TYPES = frozenset(
    {
        "deepseek_vl",
        "exaone4_5",
        "gemma3",
        "gemma4",
        "got_ocr2",
        "idefics3",
        "internvl",
        "kimi_k25",
        "lfm2_vl",
        "lighton_ocr",
        "llama4",
        "mistral3",
        "qwen3_5",
        "qwen3_5_moe",
        "smolvlm",
    }
)

#: Ending of the names of vision-language models and encoder-decoders.
CONDITIONAL = "ForConditionalGeneration"

#: Fields of a multimodal configuration that override those of its `text_config`.
_SHARED = (
    *("architectures", "quantization_config", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
    *("id2label", "label2id", "problem_type"),
)

#: Fields of a multimodal configuration that describe the whole model.
_OF_THE_WHOLE = frozenset(
    {"architectures", "dtype", "model_type", "text_config", "torch_dtype", "transformers_version"}
)

#: Ending of a name in `architectures` -> task.
TASK_ENDINGS: Mapping[str, TaskType] = {
    "ForCausalLM": TaskType.CAUSAL_LM,
    "LMHeadModel": TaskType.CAUSAL_LM,
    "ForMaskedLM": TaskType.MASKED_LM,
    "ForSequenceClassification": TaskType.SEQUENCE_CLASSIFICATION,
    "ForTokenClassification": TaskType.TOKEN_CLASSIFICATION,
    "ForQuestionAnswering": TaskType.QUESTION_ANSWERING,
    "ForMultipleChoice": TaskType.MULTIPLE_CHOICE,
    "ForCTC": TaskType.CTC,
    "ForImageClassification": TaskType.IMAGE_CLASSIFICATION,
    "Model": TaskType.BASE_MODULE,
}
#: Task of an ending -> task of classes with this ending in families that have it: classes of
#: recordings, and `CLIPModel`, which has an encoder of images and an encoder of texts.
_SPECIAL_TASKS: Mapping[TaskType, TaskType] = {
    TaskType.SEQUENCE_CLASSIFICATION: TaskType.AUDIO_CLASSIFICATION,
    TaskType.BASE_MODULE: TaskType.ZERO_SHOT_IMAGE_CLASSIFICATION,
}
#: Prefix in a multimodal checkpoint -> prefix in a text-only checkpoint; the first match applies.
_PREFIXES: Mapping[str, str] = {
    "model.language_model.blocks.": "model.layers.",  # as the last but one, in the other layout
    "model.language_model.model.": "model.",  # written by transformers 5.0 to 5.5
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.model.blocks.": "model.layers.",  # Kimi K2.5, written by transformers 5.23
    "language_model.": "",
}
#: Prefixes of other parts of checkpoints whose language model has text-only names.
_OTHERS = ("visual.", "model.visual.")
#: Prefixes of heads, which some writers store outside the language model.
_HEADS = ("lm_head.", "score.")
#: First part of the names of the MTP layer.
_MTP = "mtp."


def specialize_task(task: TaskType, tasks: Collection[TaskType]) -> TaskType:
    """Return the task of a class, from the task of its ending and the tasks of its family."""
    special = _SPECIAL_TASKS.get(task, task)
    return special if special in tasks else task


def _is_whole(stored: Mapping[str, Any], task: TaskType | None) -> bool:
    """Return whether a multimodal checkpoint is loaded with its vision tower.

    Args:
        stored: content of config.json.
        task: task of the model; None or `AUTO_BIND` = the task that `architectures` names.
    """
    if stored.get("model_type") not in _families() or stored.get("vision_config", {}) is None:
        return False
    if task is None or task == TaskType.AUTO_BIND:
        names = stored.get("architectures") or ()
        return any(str(name).endswith(CONDITIONAL) for name in names)
    return task == TaskType.IMAGE_TEXT_TO_TEXT


@cache
def _families() -> frozenset[str]:
    """Return the model types of installed families. `registry.model_types` would import jax."""
    return frozenset(point.name for point in entry_points(group="easydel.models"))


def text_settings(
    stored: Mapping[str, Any], path: str | Path = "config.json", task: TaskType | None = None
) -> Mapping[str, Any]:
    """Return the settings of the text half of a multimodal checkpoint; other settings unchanged.

    Args:
        stored: content of config.json.
        path: path of the file, for error messages.
        task: see `_is_whole`; the settings of a checkpoint that is loaded whole are unchanged.

    Raises:
        CheckpointError: the settings have no `text_config`.
    """
    model_type = stored.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES or _is_whole(stored, task):
        return stored
    text = stored.get("text_config")
    if not isinstance(text, Mapping) or not isinstance(text.get("model_type"), str):
        raise CheckpointError(
            f"{path} has model_type={model_type!r}, a multimodal model of which the text model is "
            "loaded, but no text_config with a model_type: restore the text_config of the original "
            "checkpoint"
        )
    shared = {name: stored[name] for name in _SHARED if stored.get(name) is not None}
    return {**text, **shared}


def text_tensors(files: TensorFiles, model_names: Collection[str]) -> TensorFiles:
    """Return the tensors of the text half of a multimodal checkpoint under text-only names.

    Other files are returned unchanged. Tensors outside the language model are not read, with one
    warning.

    Args:
        files: the tensors of the checkpoint.
        model_names: names of the model's tensors. A multimodal model reads the files as they are.
    """
    prefixes = tuple(_PREFIXES)
    if any(name.startswith((*prefixes, *_OTHERS)) for name in model_names):
        return files
    if any(name.startswith(prefixes) for name in files):
        has_mtp_layer = any(name.startswith(_MTP) for name in model_names)
        names = {
            name: name if has_mtp_layer and name.startswith(_MTP) else text_name(name)
            for name in files
        }
    else:
        names = {name: None if name.startswith(_OTHERS) else name for name in files}
    unread_names = [name for name, text_name in names.items() if text_name is None]
    if unread_names:
        once(
            logger,
            f"{files.directory} is a multimodal checkpoint, of which only the language model is "
            f"loaded: images are not supported, and {len(unread_names)} tensors "
            f"({min(unread_names)}, …) stay in their files",
        )
    return (
        files.rename_tensors(names)
        if unread_names or any(n != to for n, to in names.items())
        else files
    )


def tower_tensors(files: TensorFiles, tower_names: Sequence[str]) -> TensorFiles:
    """Return the tensors of a tower of a multimodal checkpoint under the names of the tower alone.

    Both towers of a checkpoint may have tensors of the same names, so the other tensors are
    removed, with one warning.

    Args:
        files: the tensors of the checkpoint.
        tower_names: names of the tower in multimodal checkpoints; empty for other models.
    """
    prefix = next((f"{t}." for t in tower_names if any(n.startswith(f"{t}.") for n in files)), None)
    if prefix is None:
        return files
    unread_names = [name for name in files if not name.startswith(prefix)]
    if unread_names:
        once(
            logger,
            f"{files.directory}: only the tower {prefix[:-1]!r} is loaded, and {len(unread_names)} "
            "other "
            f"tensors ({min(unread_names)}, …) are not read",
        )
    names = {n: n.removeprefix(prefix) if n.startswith(prefix) else None for n in files}
    return files.rename_tensors(names)


def text_name(name: str) -> str | None:
    """Return the name in a text-only checkpoint, or None outside the language model."""
    for prefix, replacement in _PREFIXES.items():
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name if name.startswith(_HEADS) else None


def count_text_prefixes(names: Collection[str]) -> tuple[tuple[str, str], ...]:
    """Return (prefix in a text-only checkpoint, prefix in a multimodal one), the longest first.

    Args:
        names: the tensors of a multimodal checkpoint. Of several prefixes, the most frequent one is
            returned.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for name in names:
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
        if prefix is not None:
            counts[_PREFIXES[prefix], prefix] += 1
        elif name.startswith(_HEADS):
            counts[(head := name.partition(".")[0] + "."), head] += 1
    prefixes: dict[str, str] = {}
    for (text_prefix, prefix), _ in counts.most_common():
        prefixes.setdefault(text_prefix, prefix)
    return tuple(sorted(prefixes.items(), key=lambda pair: -len(pair[0])))


def restore_text_half(
    stored: Mapping[str, Any], text: Mapping[str, Any], fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of a multimodal model with another text half.

    A value of the whole model that repeats one of its text half changes with it.

    Args:
        stored: content of config.json of the multimodal checkpoint.
        text: content of config.json of the text half.
        fields: all fields of the text half, those with default values too.
    """
    stored_text, new_text, new = stored["text_config"], dict(text), dict(stored)

    def has_changed(name: str) -> bool:
        return name in fields and fields[name] not in (stored.get(name), stored_text.get(name))

    for name in stored.keys() & fields.keys() - _OF_THE_WHOLE:
        repeats = name in _SHARED or stored_text.get(name) == stored[name]
        if repeats and (has_changed(name) or name == "tie_word_embeddings"):
            new[name] = fields[name]
    for name in _SHARED:
        if name in stored and name not in stored_text:
            new_text.pop(name, None)
        elif name in stored and name in stored_text and new[name] == stored[name]:
            new_text[name] = stored_text[name]
    for name in ("architectures", "transformers_version"):
        new_text.pop(name, None)
    if "architectures" in stored_text:
        new_text["architectures"] = stored_text["architectures"]
    new.pop("quantization_config", None)
    new_text.pop("quantization_config", None)
    if text.get("quantization_config") is not None:
        new["quantization_config"] = text["quantization_config"]
    dtype = "torch_dtype" if "torch_dtype" in stored and "dtype" not in stored else "dtype"
    return {**new, dtype: text.get("dtype"), "text_config": new_text}


def find_config(name_or_path: str, revision: str | None = None) -> Path | None:
    """Return config.json of a folder, or of the hub's local cache; None if neither has one."""
    try:
        if is_package_address(name_or_path):
            name_or_path = str(find_package_file(name_or_path))
        path = Path(name_or_path).expanduser() / "config.json"
        if path.is_file():
            return path
        cached = try_to_load_from_cache(name_or_path, "config.json", revision=revision)
    except (CheckpointError, HFValidationError, OSError, RuntimeError, ValueError):
        return None
    return Path(cached) if isinstance(cached, str) else None
