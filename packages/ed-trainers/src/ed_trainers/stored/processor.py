"""What is saved beside the model: a tokenizer, or a processor."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Protocol

from ed_models.protocol import LanguageModel

# From here on a length is no length: transformers writes 1e30 for one that it does not know.
_UNLIMITED = 1e20


class Saveable(Protocol):
    """A tokenizer, or a processor."""

    def save_pretrained(self, save_directory: str | Path) -> object:
        """Write the files that `from_pretrained` reads."""
        ...


def with_length(tokenizer: Saveable, model: LanguageModel) -> Saveable:
    """Return a tokenizer that knows how many tokens the model takes.

    One that was never told says 1e30, which whoever truncates by it takes at its word.
    """
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is None or getattr(tokenizer, "model_max_length", 0) < _UNLIMITED:
        return tokenizer
    told = copy.copy(tokenizer)
    told.model_max_length = longest  # type: ignore[attr-defined]
    return told
