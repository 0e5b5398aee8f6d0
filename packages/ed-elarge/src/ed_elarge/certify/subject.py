"""The directory that a certificate describes. Its parts are read at their first use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ed_infra.enums import TaskType
from ed_infra.errors import CheckpointError

from ed_elarge.certify.encodings import Encodings
from ed_elarge.certify.outcome import NotApplicable

if TYPE_CHECKING:
    from ed_esurge.template import ChatTemplate
    from ed_models.checkpoints.tensor_files import TensorFiles

MODEL, ADAPTER = "model", "adapter"


class CertifiedModel:
    """A model directory in Hugging Face layout, or the output folder of a run.

    Args:
        directory: the directory. An output folder has the folders `model` or `adapter`.
        base: the model before training, or the model in full precision.

    Raises:
        CheckpointError: the directory contains neither a model nor an adapter.
    """

    def __init__(self, directory: Path, base: Path | None = None) -> None:
        self.directory = directory
        self.model_folder = _first(directory, MODEL, "config.json")
        self.adapter_folder = _first(directory, ADAPTER, "adapter_config.json")
        if self.model_folder is None and self.adapter_folder is None:
            raise CheckpointError(
                f"{directory} contains neither config.json nor adapter_config.json: give a model "
                "directory, or the output folder of a run"
            )
        if base is None and self.adapter_folder is not None:
            base = _find_base(self.adapter_folder)
        self._base = base
        if self.model_folder is None and base is None:
            raise CheckpointError(
                f"{self.adapter_folder} contains an adapter whose base model is not a directory: "
                "name it with --against"
            )

    @cached_property
    def base(self) -> CertifiedModel:
        """The model of `--against`.

        Raises:
            NotApplicable: there is no such model.
        """
        if self._base is None:
            raise NotApplicable("no base model: --against names one")
        return CertifiedModel(self._base)

    @property
    def folder(self) -> Path:
        """The folder of the model: its own, or that of the base model of an adapter."""
        return self.model_folder or self.base.folder

    @property
    def is_adapter(self) -> bool:
        """Whether the directory contains only an adapter."""
        return self.model_folder is None

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The content of config.json. A model for several modalities has its language model's."""
        stored = read_json(self.folder / "config.json")
        return {**stored, **stored.get("text_config", {})}

    @cached_property
    def generation_settings(self) -> Mapping[str, Any]:
        """The content of generation_config.json; empty without the file."""
        path = self.folder / "generation_config.json"
        return read_json(path) if path.is_file() else {}

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the directory, a `PreTrainedTokenizerBase`."""
        from ed_models.checkpoints.tokenizers import load_tokenizer

        adapter_folder = self.adapter_folder if self.is_adapter else None
        for folder in (adapter_folder, self.folder):
            if folder is not None and list(folder.glob("token*")):
                return load_tokenizer(str(folder))
        raise NotApplicable("there is no tokenizer")

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template as the engine renders it."""
        from ed_esurge.template import ChatTemplate

        if getattr(self.tokenizer, "chat_template", None) is None:
            raise NotApplicable("the tokenizer has no chat template")
        return ChatTemplate(self.tokenizer)

    @cached_property
    def encodings(self) -> Encodings:
        """The tokens of conversations."""
        return Encodings(self)

    @cached_property
    def tensors(self) -> TensorFiles:
        """The tensors of the safetensors files.

        Raises:
            NotApplicable: there are no such files.
        """
        from ed_models.checkpoints.tensor_files import TensorFiles

        if not list(self.folder.glob("*.safetensors")):
            raise NotApplicable("there are no safetensors files")
        return TensorFiles.open(self.folder)

    @cached_property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens at which the engine ends a reply."""
        config_ids = self.settings.get("eos_token_id")
        end_ids = self.generation_settings.get("eos_token_id", config_ids)
        listed = end_ids if isinstance(end_ids, list) else [end_ids]
        return frozenset(token for token in listed if isinstance(token, int))

    @property
    def task(self) -> TaskType:
        """The task of the model."""
        from ed_models.checkpoints.checks import detect_task

        return detect_task(self.folder)

    @property
    def is_causal(self) -> bool:
        """Whether the model is a causal language model."""
        return self.task == TaskType.CAUSAL_LM

    @cached_property
    def model(self) -> Any:
        """The model in float32 on the devices of this machine.

        Raises:
            NotApplicable: the model generates no text.
        """
        from ed_models.checkpoints import hub

        if not self.is_causal:
            raise NotApplicable("the model is not a causal language model")
        model = hub.from_pretrained(self.folder)
        if self.is_adapter:
            from ed_models.adapters.peft import load_adapter

            assert self.adapter_folder is not None
            model = load_adapter(model, self.adapter_folder).shard_model()
        return model


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    try:
        json_object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(json_object, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return json_object


def _first(directory: Path, part: str, file: str) -> Path | None:
    places = (directory, directory / part)
    return next((place for place in places if (place / file).is_file()), None)


def _find_base(adapter: Path) -> Path | None:
    from ed_models.checkpoints.saving import find_checkpoint

    settings = read_json(adapter / "adapter_config.json")
    name = settings.get("base_model_name_or_path")
    if not name:
        return None
    inner = adapter / name
    if (inner / "config.json").is_file():
        return inner
    return find_checkpoint(name, settings.get("revision"))
