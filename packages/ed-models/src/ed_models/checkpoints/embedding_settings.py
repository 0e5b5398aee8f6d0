"""The settings of an embedding checkpoint for texts: prompts, lengths, and the size of vectors.

The files are those of sentence-transformers. Unknown keys are kept and written again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ed_infra.errors import CheckpointError, ConfigError, unknown_name

#: The file with the prompts.
MODEL_NAME = "config_sentence_transformers.json"
#: The file with the settings of the tokenizer.
TRANSFORMER_NAME = "sentence_bert_config.json"
#: Functions that compare two vectors, by the names of sentence-transformers.
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
# The limit of a tokenizer without a limit is a larger number.
_LONGEST = 2**31


@dataclass(frozen=True)
class EmbeddingSettings:
    """The settings of an embedding model for texts.

    Attributes:
        model_json: content of `config_sentence_transformers.json`.
        transformer_json: content of `sentence_bert_config.json`.
        include_prompt: whether the tokens of a prompt are pooled.
        max_seq_length: maximum number of tokens of a text; None = the limit of the model.
    """

    model_json: str = "{}"
    transformer_json: str = "{}"
    include_prompt: bool = True
    max_seq_length: int | None = None

    @property
    def prompts(self) -> Mapping[str, str]:
        """Name -> text that precedes a text to embed, such as `query: `.

        The prompts `query` and `document` always exist; they are empty by default.
        """
        stored = json.loads(self.model_json).get("prompts") or {}
        return {"query": "", "document": ""} | {name: text or "" for name, text in stored.items()}

    @property
    def default_prompt_name(self) -> str | None:
        """Name of the prompt of texts without a prompt name; None = no prompt."""
        return json.loads(self.model_json).get("default_prompt_name")

    @property
    def similarity_fn_name(self) -> str:
        """Name of the function that compares two vectors, one of `SIMILARITIES`."""
        name = json.loads(self.model_json).get("similarity_fn_name")
        return name if name in SIMILARITIES else SIMILARITIES[0]

    @property
    def truncate_dim(self) -> int | None:
        """Number of elements of a vector that are kept (Matryoshka); None = all."""
        return json.loads(self.model_json).get("truncate_dim")

    @property
    def do_lower_case(self) -> bool:
        """Whether texts are converted to lower case before they are tokenized."""
        return bool(json.loads(self.transformer_json).get("do_lower_case", False))

    def prompt(self, name: str | None = None) -> str:
        """Return the text of a prompt.

        Args:
            name: name of the prompt; None = the default prompt of the checkpoint, "" = no prompt.

        Raises:
            ConfigError: the checkpoint has no prompt with this name.
        """
        name = self.default_prompt_name if name is None else name
        prompts = self.prompts
        if not name:
            return ""
        if name not in prompts:
            raise unknown_name("prompt_name", name, prompts)
        return prompts[name]

    def first_prompt(self, *names: str) -> str:
        """Return the prompt of the first name that the checkpoint has; else the default prompt."""
        return self.prompt(next((name for name in names if name in self.prompts), None))

    def replace_truncate_dim(self, truncate_dim: int) -> EmbeddingSettings:
        """Return the settings with another size of the vectors.

        Raises:
            ConfigError: the size is not a positive integer.
        """
        if isinstance(truncate_dim, bool) or not isinstance(truncate_dim, int) or truncate_dim < 1:
            raise ConfigError(f"truncate_dim={truncate_dim!r} is invalid: it must be at least 1")
        stored = json.loads(self.model_json) | {"truncate_dim": truncate_dim}
        return replace(self, model_json=json.dumps(stored))

    @classmethod
    def read(cls, directory: Path, *, include_prompt: bool = True) -> EmbeddingSettings:
        """Read the settings of a checkpoint; missing files have the default settings.

        Args:
            directory: the directory of the checkpoint.
            include_prompt: see the attribute; the pooling module stores the value.

        Raises:
            CheckpointError: a file is damaged, or a setting has a wrong type.
        """
        model = _read(directory / MODEL_NAME)
        transformer = _read(directory / TRANSFORMER_NAME)
        limit = transformer.get("max_seq_length")
        if limit is None:
            limit = _read(directory / "tokenizer_config.json").get("model_max_length")
        settings = cls(
            json.dumps(model),
            json.dumps(transformer),
            include_prompt,
            limit if isinstance(limit, int) and 0 < limit < _LONGEST else None,
        )
        prompts, size = model.get("prompts") or {}, model.get("truncate_dim")
        if not isinstance(prompts, dict) or not all(
            isinstance(text, str | None) for text in prompts.values()
        ):
            raise CheckpointError(
                f"{directory / MODEL_NAME}: prompts must map names to texts, got {prompts!r}"
            )
        if settings.default_prompt_name not in (None, *settings.prompts):
            raise CheckpointError(
                f"{directory / MODEL_NAME}: default_prompt_name is "
                f"{settings.default_prompt_name!r}, but the prompts are "
                f"{', '.join(settings.prompts)}"
            )
        if size is not None and (not isinstance(size, int) or size < 1):
            raise CheckpointError(
                f"{directory / MODEL_NAME}: truncate_dim is {size!r}, but must be at least 1"
            )
        return settings

    def write(self, directory: Path) -> None:
        """Write the files that have content."""
        files = {MODEL_NAME: self.model_json, TRANSFORMER_NAME: self.transformer_json}
        for name, text in files.items():
            content = json.loads(text)
            if content:
                (directory / name).write_text(json.dumps(content, indent=2) + "\n")


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is no JSON object")
    return content
