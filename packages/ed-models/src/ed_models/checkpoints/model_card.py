"""The card of a saved model or adapter: `README.md` with metadata that the hub reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from ed_infra.enums import TaskType
from ed_infra.logging import get_logger
from ed_infra.package_files import get_source_name
from huggingface_hub import ModelCard, ModelCardData

from ed_models.checkpoints.saving import Saved, find_checkpoint

logger = get_logger(__name__)
_NAME = "README.md"
#: The end of a card of this project. Other cards are not changed.
_MARK = "<!-- Written by EasyDeL. A card without this line is not replaced. -->"
_MAX_CARD = 2**22  # bytes
#: Task -> the task of the hub.
_PIPELINES: Mapping[TaskType | None, str] = {
    TaskType.CAUSAL_LM: "text-generation",
    TaskType.SEQUENCE_TO_SEQUENCE: "text2text-generation",
    TaskType.SPEECH_SEQUENCE_TO_SEQUENCE: "automatic-speech-recognition",
    TaskType.CTC: "automatic-speech-recognition",
    TaskType.MASKED_LM: "fill-mask",
    TaskType.SEQUENCE_CLASSIFICATION: "text-classification",
    TaskType.TOKEN_CLASSIFICATION: "token-classification",
    TaskType.QUESTION_ANSWERING: "question-answering",
    TaskType.IMAGE_TEXT_TO_TEXT: "image-text-to-text",
    TaskType.ANY_TO_ANY: "audio-text-to-text",
    TaskType.IMAGE_CLASSIFICATION: "image-classification",
    TaskType.ZERO_SHOT_IMAGE_CLASSIFICATION: "zero-shot-image-classification",
    TaskType.EMBEDDING: "sentence-similarity",
    TaskType.BASE_MODULE: "feature-extraction",
    TaskType.BASE_VISION: "image-feature-extraction",
}


def is_own_card(path: Path) -> bool:
    """Return whether a card may be replaced: the file does not exist, or this project wrote it."""
    return not path.exists() or _MARK in path.read_text("utf-8", errors="replace")


def write_card(directory: Path, model: Saved, *, is_adapter: bool = False) -> None:
    """Write the card of a model, unless the directory has a card of somebody else.

    Args:
        directory: the directory of the model or adapter.
        model: the model; `name_or_path` of its configuration is its base.
        is_adapter: whether the directory contains an adapter in PEFT's layout.
    """
    config, base = model.config, getattr(model.config, "name_or_path", None) or None
    kind = getattr(config, "model_type", type(model).__name__)
    license_fields = read_license(base, getattr(config, "_commit_hash", None))
    tags = [kind, *(["lora"] if is_adapter else [])]
    data = ModelCardData(
        base_model=base,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag=_PIPELINES.get(getattr(type(model), "model_task", None)),
        tags=[*tags, "easydel"],
        **license_fields,
    )
    title = "LoRA adapter" if is_adapter else kind
    name = get_source_name(base) if base else None
    origin = f" for {name}" if is_adapter and name else f" from {name}" if name else ""
    class_name = getattr(model, "architecture", None) or type(model).__name__
    text = f"# {title}{origin}\n\nClass: `{class_name}`."
    _write(directory, data, text)


def add_section(
    directory: Path, title: str, lines: Sequence[str], *, datasets: Sequence[str] = ()
) -> None:
    """Add a section to the card of a directory, or replace the section of this title.

    Args:
        directory: a directory with a card; without a card of this project nothing is written.
        title: title of the section.
        lines: lines of Markdown.
        datasets: data sets of the hub that the metadata names.
    """
    card = _read(directory)
    if card is None or _MARK not in card.text:
        return
    if datasets:
        vars(card.data)["datasets"] = [*datasets]
    sections = card.text.replace(_MARK, "").strip().split("\n## ")
    sections = [section.strip() for section in sections if not section.startswith(f"{title}\n")]
    body = "\n".join(lines)
    _write(directory, card.data, "\n\n## ".join([*sections, f"{title}\n\n{body}"]))


def read_license(base: str | None, revision: str | None = None) -> dict[str, Any]:
    """Return the fields of the license in the card of a base model; empty without a local card."""
    directory = find_checkpoint(base, revision)
    if directory is None:
        return {}
    card = _read(directory)
    fields = {} if card is None else card.data.to_dict()
    names = ("license", "license_name", "license_link")
    return {name: fields[name] for name in names if fields.get(name)}


def _read(directory: Path) -> ModelCard | None:
    path = directory / _NAME
    try:
        if not path.is_file() or path.stat().st_size > _MAX_CARD:
            return None
        return ModelCard(path.read_text("utf-8"), ignore_metadata_errors=True)
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        logger.warning(f"{path} is not read as a model card: {error}")
        return None


def _write(directory: Path, data: Any, text: str) -> None:
    path = directory / _NAME
    if is_own_card(path):
        path.write_text(f"---\n{data.to_yaml()}\n---\n\n{text}\n\n{_MARK}\n", "utf-8")
