"""Saving, uploading and converting models: the functions behind `EasyBridgeMixin`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub
import jax
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_layers.quantization.model import is_quantized
from jax.typing import DTypeLike

from ed_models.adapters.lora import has_lora
from ed_models.adapters.peft import save_adapter
from ed_models.checkpoints.model_card import write_card
from ed_models.checkpoints.saving import (
    TokenizerFiles,
    copy_companions,
    find_stored_tokenizer,
    save_model,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Task -> the class of `transformers` that loads a saved module of the task.
TORCH_CLASSES: Mapping[TaskType, str] = {
    TaskType.CAUSAL_LM: "AutoModelForCausalLM",
    TaskType.MASKED_LM: "AutoModelForMaskedLM",
    TaskType.SEQUENCE_CLASSIFICATION: "AutoModelForSequenceClassification",
    TaskType.TOKEN_CLASSIFICATION: "AutoModelForTokenClassification",
    TaskType.QUESTION_ANSWERING: "AutoModelForQuestionAnswering",
    TaskType.MULTIPLE_CHOICE: "AutoModelForMultipleChoice",
    TaskType.SEQUENCE_TO_SEQUENCE: "AutoModelForSeq2SeqLM",
    TaskType.SPEECH_SEQUENCE_TO_SEQUENCE: "AutoModelForSpeechSeq2Seq",
    TaskType.CTC: "AutoModelForCTC",
    TaskType.AUDIO_CLASSIFICATION: "AutoModelForAudioClassification",
    TaskType.IMAGE_TEXT_TO_TEXT: "AutoModelForImageTextToText",
    TaskType.ANY_TO_ANY: "AutoModelForMultimodalLM",
    TaskType.IMAGE_CLASSIFICATION: "AutoModelForImageClassification",
    TaskType.ZERO_SHOT_IMAGE_CLASSIFICATION: "AutoModelForZeroShotImageClassification",
    TaskType.BASE_MODULE: "AutoModel",
    TaskType.BASE_VISION: "AutoModel",
    TaskType.EMBEDDING: "AutoModel",
}
#: End of the names of classes with the encoder of an encoder-decoder.
ENCODER = "EncoderModel"


def save_pretrained(
    model: Any,
    save_directory: str | Path,
    *,
    tokenizer: TokenizerFiles | None,
    max_shard_size: int | str,
    dtype: DTypeLike | None,
    whole: bool = True,
) -> None:
    """Write a model, or its adapters; see `EasyBridgeMixin.save_pretrained`."""
    source, target = getattr(model.config, "name_or_path", None), Path(save_directory)
    revision = getattr(model.config, "_commit_hash", None)
    if tokenizer is None:
        tokenizer = find_stored_tokenizer(source, target, revision=revision)
    if not has_lora(model):
        carried = model.carried_tensors if whole else None
        save_model(
            model,
            target,
            tokenizer=tokenizer,
            max_shard_size=max_shard_size,
            dtype=dtype,
            carried=carried,
        )
        if whole and jax.process_index() == 0:
            copy_companions(source, target, revision=revision)
        if carried is not None and target.resolve() == Path(carried.directory).resolve():
            model.carried_tensors = carried.move_to(target)
        return
    if dtype is not None:
        raise ConfigError(
            "adapters are saved in float32: omit dtype, or merge them first "
            "(unwrap_lora_to_layers) to save a model"
        )
    save_adapter(model, save_directory, base=source or None, revision=revision)
    if jax.process_index() == 0:
        write_card(Path(save_directory), model, is_adapter=True)
    if tokenizer is not None:
        tokenizer.save_pretrained(Path(save_directory))


def to_torch(model: Any) -> PreTrainedModel:
    """Convert a model to a `transformers` class; see `EasyBridgeMixin.to_torch`."""
    if has_lora(model):
        raise ConfigError(
            "to_torch does not convert a model with adapters: merge them first "
            "(unwrap_lora_to_layers), or write them (save_pretrained) and load them with PEFT"
        )
    if is_quantized(model):
        raise ConfigError(
            "to_torch does not convert a quantized model: call dequantize first, or load the "
            "checkpoint that was not quantized"
        )
    if find_spec("torch") is None:
        raise ConfigError(
            "to_torch needs torch, which is not installed: install it, or write a directory "
            "with save_pretrained and load that with transformers elsewhere"
        )
    import transformers

    task: TaskType | None = getattr(type(model), "model_task", None)
    auto: Any = None
    if task is not None and task in TORCH_CLASSES:
        auto = getattr(transformers, TORCH_CLASSES[task], None)
    configs, model_type = transformers.CONFIG_MAPPING, model.config.model_type
    if auto is None or model_type not in configs or configs[model_type] not in auto._model_mapping:
        raise ConfigError(
            f"transformers has no {task or 'registered task'} of model type {model_type!r}, so "
            f"{type(model).__name__} has no counterpart in torch"
        )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, whole=False)
        architecture = model.architecture or type(model).__name__
        if architecture.endswith(ENCODER):
            auto = getattr(transformers, architecture, auto)
        return auto.from_pretrained(folder, dtype="auto").eval()


def push_to_hub(
    model: Any,
    repo_id: str,
    *,
    private: bool | None,
    token: str | bool | None,
    revision: str | None,
    commit_message: str,
    **saving: Any,
) -> str:
    """Upload a model; see `EasyBridgeMixin.push_to_hub`. `saving` goes to `save_pretrained`."""
    api = huggingface_hub.HfApi(token=token)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "model"
        model.save_pretrained(target, **saving)
        if jax.process_index() != 0:
            return f"{repo_id} (uploaded by process 0)"
        write_card(target, model, is_adapter=has_lora(model))
        repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        commit = api.upload_folder(
            repo_id=repo, folder_path=target, revision=revision, commit_message=commit_message
        )
    return str(commit)
