"""Prompts of models that fill a gap between two texts (fill in the middle)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ed_esurge.template import ChatTemplate
from ed_esurge.tokenizer import Tokenizer


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


def find_token(tokenizer: Tokenizer, name: str) -> int | None:
    """Return the id of a token; None if the vocabulary lacks the token.

    `get_vocab` would copy the complete vocabulary.
    """
    token = tokenizer.convert_tokens_to_ids(name)
    is_in_vocabulary = isinstance(token, int) and tokenizer.convert_ids_to_tokens(token) == name
    return token if is_in_vocabulary else None


def infill_tokens(tokenizer: Tokenizer) -> InfillFormat | None:
    """Return the format whose tokens a vocabulary contains; None = the model fills no gaps."""

    def has(names: Iterable[str]) -> bool:
        return all(find_token(tokenizer, name) is not None for name in names if name)

    best = None
    for infill_format in INFILL_FORMATS.values():
        needed = [infill_format.prefix, infill_format.suffix, infill_format.middle]
        if has(needed):
            if has([infill_format.repository, infill_format.file]):
                return infill_format
            best = best or InfillFormat(*needed, suffix_first=infill_format.suffix_first)
    return best


class InfillPrompts:
    """Builds the prompts of gaps for one model.

    Args:
        tokenizer: a Hugging Face tokenizer. The first prompt creates a copy of the tokenizer that
            encodes special tokens in texts as text.

    Attributes:
        form: None = the model fills no gaps.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.form = infill_tokens(tokenizer)
        self._encoder = ChatTemplate(tokenizer, "")

    def build(self, prefix: str, suffix: str, files: Sequence[tuple[str, str]]) -> list[int]:
        """Return the tokens of a prompt. The texts never become special tokens.

        Args:
            prefix, suffix: the texts around the gap.
            files: names and texts of other files of the repository.
        """
        form, text = self.form, self._encoder.as_text
        assert form is not None, "the caller has checked the form"

        def token(name: str) -> list[int]:
            token_id = find_token(self._tokenizer, name) if name else None
            return [] if token_id is None else [token_id]

        first = [*token(form.prefix), *text(prefix)]
        second = [*token(form.suffix), *text(suffix)]
        parts = [*second, *first] if form.suffix_first else [*first, *second]
        repository_tokens: list[int] = []
        if files and form.file:
            repository_tokens = [
                *token(form.repository),
                *text("repository\n" if form.repository else ""),
            ]
            for name, content in files:
                repository_tokens += [*token(form.file), *text(f"{name}\n{content}\n")]
            repository_tokens += token(form.file)
        start = getattr(self._tokenizer, "bos_token_id", None)
        add = getattr(self._tokenizer, "add_bos_token", False)
        begin = [start] if isinstance(start, int) and add else []
        return [*begin, *repository_tokens, *parts, *token(form.middle)]
