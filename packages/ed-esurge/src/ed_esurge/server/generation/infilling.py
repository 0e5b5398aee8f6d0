"""Prompts of models that fill a gap between two texts (fill in the middle)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol


class InfillTokens(Protocol):
    """The part of a tokenizer that decides whether a model can fill gaps."""

    def get_vocab(self) -> Mapping[str, int]:
        """Return the id of each token."""
        ...


@dataclass(frozen=True)
class InfillFormat:
    """Special tokens around the two texts.

    Attributes:
        prefix, suffix: tokens before the two texts.
        middle: token after both texts; empty = the answer follows the prefix.
        suffix_first: whether the suffix precedes the prefix.
        repository, file: tokens before the name of the repository, and before each further file.
    """

    prefix: str
    suffix: str
    middle: str
    suffix_first: bool = False
    repository: str = ""
    file: str = ""


#: The published formats, by the first model with the format.
INFILL_FORMATS: Mapping[str, InfillFormat] = {
    "qwen2.5-coder": InfillFormat(
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        repository="<|repo_name|>",
        file="<|file_sep|>",
    ),
    "starcoder2": InfillFormat(
        *("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        repository="<repo_name>",
        file="<file_sep>",
    ),
    "codegemma": InfillFormat(
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), file="<|file_separator|>"
    ),
    "granite-code": InfillFormat("<|fim_pre|>", "<|fim_suf|>", "<|fim_mid|>"),
    "deepseek-coder": InfillFormat("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    "codellama": InfillFormat("▁<PRE>", "▁<SUF>", "▁<MID>"),
    "codestral": InfillFormat("[PREFIX]", "[SUFFIX]", "", suffix_first=True),
    "glm4": InfillFormat("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
}


def infill_tokens(tokenizer: InfillTokens) -> InfillFormat | None:
    """Return the format whose tokens a vocabulary contains; None = the model fills no gaps."""
    vocabulary: Collection[str] = tokenizer.get_vocab()
    best = None
    for known in INFILL_FORMATS.values():
        needed = [known.prefix, known.suffix, known.middle]
        if all(token in vocabulary for token in needed if token):
            extras = [token in vocabulary for token in (known.repository, known.file) if token]
            if all(extras):
                return known
            best = best or InfillFormat(*needed, suffix_first=known.suffix_first)
    return best
