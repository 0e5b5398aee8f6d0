"""Methods for Hugging Face directories, the hub, and torch."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import huggingface_hub
import jax
import numpy as np
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_layers.quantization.model import is_quantized
from jax.typing import DTypeLike

from ed_models.adapters.lora import has_lora
from ed_models.adapters.peft import save_adapter
from ed_models.checkpoints import hub
from ed_models.checkpoints.saving import Tokenizer, save
from ed_models.generation import options as generation_options
from ed_models.weights.blocks import Shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Task -> the class of `transformers` that loads a saved module of the task.
TORCH_CLASSES: Mapping[TaskType, str] = {
    TaskType.CAUSAL_LM: "AutoModelForCausalLM",
    TaskType.SEQUENCE_CLASSIFICATION: "AutoModelForSequenceClassification",
    TaskType.BASE_MODULE: "AutoModel",
    TaskType.EMBEDDING: "AutoModel",
}


class EasyBridgeMixin:
    """`from_pretrained`, `save_pretrained` and `push_to_hub` for a module with a config."""

    config: EasyDeLBaseConfig
    #: Name of the class in config.json; None = the name of the Python class.
    architecture: ClassVar[str | None] = None
    # Text of the checkpoint's generation_config.json: kept for saving, read for special tokens.
    generation_json: str | None = None

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **options: Any) -> Self:
        """Load this class from a directory or a hub repository.

        `ed_models.checkpoints.hub.from_pretrained` lists the options and errors.
        """
        return hub.from_pretrained(name_or_path, cls, **options)

    @classmethod
    def read_settings(cls, directory: Path) -> dict[str, object]:
        """Return attributes that come from files other than config.json and the weights."""
        return {"generation_json": generation_options.read_settings(directory)}

    @classmethod
    def new_tensors(
        cls, config: EasyDeLBaseConfig, shapes: Mapping[str, Shape]
    ) -> Mapping[str, np.ndarray]:
        """Return values for tensors that a checkpoint of another task lacks; default: none."""
        return {}

    def write_settings(self, directory: Path) -> None:
        """Write the files other than config.json and the weights."""
        text = self.generation_json
        if text is None:
            tokens = generation_options.special_tokens(self.config)
            text = json.dumps(tokens, indent=2, sort_keys=True) + "\n"
        (directory / generation_options.FILE_NAME).write_text(text)

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        tokenizer: Tokenizer | None = None,
        max_shard_size: int | str = "5GB",
        dtype: DTypeLike | None = None,
    ) -> None:
        """Write config, weights, generation settings and tokenizer in the layout of `transformers`.

        Quantized matrices are written as codes and scales, under names that `from_pretrained` reads
        (`ed_models.checkpoints.quantized_tensors`). Call `dequantize` first to write a model that
        `transformers` reads. A model with adapters writes only the adapters, in PEFT's layout
        (float32, one file). Merge the adapters (`unwrap_lora_to_layers`) to write a model. See
        `ed_models.checkpoints.saving.save` for the arguments.

        Raises:
            ConfigError: `dtype` is set and the model has adapters.
        """
        if has_lora(self):
            if dtype is not None:
                raise ConfigError(
                    "adapters are saved in float32: leave dtype out, or merge them first "
                    "(unwrap_lora_to_layers) to save a model"
                )
            save_adapter(self, save_directory, base=self.config.name_or_path or None)
            if tokenizer is not None:
                tokenizer.save_pretrained(Path(save_directory))
            return
        save(self, save_directory, tokenizer=tokenizer, max_shard_size=max_shard_size, dtype=dtype)

    def to_torch(self) -> PreTrainedModel:
        """Return the model as a `transformers` class on torch's CPU, with the same dtypes.

        Raises:
            ConfigError: torch is not installed, `transformers` has no such model, or the model has
                adapters or is quantized.
        """
        if has_lora(self):
            raise ConfigError(
                "a model with adapters is no plain model of transformers: merge them first "
                "(unwrap_lora_to_layers), or write them (save_pretrained) and load them with PEFT"
            )
        if is_quantized(self):  # type: ignore[arg-type]
            raise ConfigError(
                "a quantized model is no plain model of transformers: call dequantize first, or "
                "load the checkpoint that was not quantized"
            )
        if find_spec("torch") is None:
            raise ConfigError(
                "to_torch needs torch, which is not installed: install it, or write a directory "
                "with save_pretrained and load that with transformers elsewhere"
            )
        import transformers

        task = getattr(type(self), "model_task", None)
        auto: Any = getattr(transformers, TORCH_CLASSES.get(task, ""), None)  # type: ignore[arg-type]
        known, model_type = transformers.CONFIG_MAPPING, self.config.model_type
        if auto is None or model_type not in known or known[model_type] not in auto._model_mapping:
            raise ConfigError(
                f"transformers has no {task or 'registered task'} of model type {model_type!r}, so "
                f"{type(self).__name__} has no counterpart in torch"
            )
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return auto.from_pretrained(folder, dtype="auto").eval()

    def push_to_hub(
        self,
        repo_id: str,
        *,
        tokenizer: Tokenizer | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str = "Upload model",
        max_shard_size: int | str = "5GB",
        dtype: DTypeLike | None = None,
    ) -> str:
        """Upload to a hub repository, created if it does not exist; return the commit's URL."""
        api = huggingface_hub.HfApi(token=token)
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "model"
            self.save_pretrained(
                target, tokenizer=tokenizer, max_shard_size=max_shard_size, dtype=dtype
            )
            if jax.process_index() != 0:
                return f"{repo_id} (uploaded by process 0)"
            repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            commit = api.upload_folder(
                repo_id=repo, folder_path=target, revision=revision, commit_message=commit_message
            )
        return str(commit)
