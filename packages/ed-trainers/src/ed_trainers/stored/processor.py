"""The tokenizer or processor that is saved with the model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Protocol

from ed_models.generation.prompts import longest_sequence
from ed_models.protocol import LanguageModel


class Saveable(Protocol):
    """A tokenizer, or a processor."""

    def save_pretrained(self, save_directory: str | Path) -> object:
        """Write the files that `from_pretrained` reads."""
        ...


def with_length(tokenizer: Saveable, model: LanguageModel) -> Saveable:
    """Return a tokenizer whose `model_max_length` is at most the length of the model.

    A tokenizer without a length has the value 1e30, and truncation to that length does nothing. The
    tokenizer of a teacher may have more positions than the student. Truncation and padding of an
    earlier call are removed, because other programs apply those of tokenizer.json to every text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
    longest = longest_sequence(model.config)
    if longest is None or getattr(tokenizer, "model_max_length", 0) <= longest:
        return tokenizer
    limited_tokenizer = copy.copy(tokenizer)
    limited_tokenizer.model_max_length = longest  # type: ignore[attr-defined]
    return limited_tokenizer
