"""Tokens of texts and of pairs of texts, up to a limit.

Tokens are removed after tokenization, because the truncation of a tokenizer is a state that other
threads share. The result equals that of the truncation of `transformers`.
"""

from __future__ import annotations

from typing import Any, Literal

from ed_esurge.server.http.errors import APIError
from ed_esurge.tokenizer import Tokenizer

#: The side of a text that loses tokens.
PairSide = Literal["left", "right"]


def encode_pair(
    tokenizer: Tokenizer, first: str, second: str, limit: int | None, most: int | None
) -> tuple[list[int], int | None, int]:
    """Return the token ids of a pair, the index of the first token of type 1, and what was removed.

    Args:
        tokenizer: Hugging Face tokenizer.
        first, second: the texts.
        limit: maximum number of tokens of the pair; the longer text is truncated. None = unlimited.
        most: maximum number of tokens of the second text; None = unlimited.

    Returns:
        token ids; index, or None if all tokens have type 0; number of removed tokens.

    Raises:
        APIError: 400, the tokenizer does not support truncation, or the special tokens alone exceed
            the limit.
    """
    encoded = tokenizer(first, second)
    ids, types = encoded["input_ids"], encoded.get("token_type_ids") or []
    remaining_places = list(range(len(ids)))
    if most is not None or (limit is not None and len(ids) > limit):
        texts = [_places(encoded, text) for text in (0, 1)]
        counts = [len(texts[0]), min(len(texts[1]), len(ids) if most is None else most)]
        if limit is not None:
            special = len(ids) - len(texts[0]) - len(texts[1])
            counts = _longest_first(counts[0], counts[1], limit - special)
        removed = {*texts[0][counts[0] :], *texts[1][counts[1] :]}
        remaining_places = [place for place in remaining_places if place not in removed]
    start = next((new for new, old in enumerate(remaining_places) if types and types[old]), None)
    return [ids[place] for place in remaining_places], start, len(ids) - len(remaining_places)


def encode_text(
    tokenizer: Tokenizer, text: str, limit: int, side: PairSide, *, add_special_tokens: bool
) -> tuple[list[int], int]:
    """Return the token ids of a text, and the number of removed tokens.

    The special tokens before and after the text are kept, as in the truncation of `transformers`.

    Args:
        tokenizer: Hugging Face tokenizer.
        limit: maximum number of tokens.
        side: "left" removes the first tokens of the text, "right" the last tokens.
        add_special_tokens: whether the tokenizer adds special tokens.

    Raises:
        APIError: 400, the special tokens alone exceed the limit.
    """
    encoded = tokenizer(
        text, add_special_tokens=add_special_tokens, return_special_tokens_mask=True
    )
    ids, special = list(encoded["input_ids"]), encoded["special_tokens_mask"]
    if len(ids) <= limit:
        return ids, 0
    added = tokenizer.num_special_tokens_to_add() if add_special_tokens else 0
    begin = next((place for place in range(added) if not special[place]), added)
    end = len(ids)
    while end > begin and begin + len(ids) - end < added and special[end - 1]:
        end -= 1
    room = limit - begin - (len(ids) - end)
    if room < 1:
        raise APIError(
            f"truncate_prompt_tokens={limit} leaves no room for text beside the {limit - room} "
            f"special tokens: use at least {limit - room + 1}",
            param="truncate_prompt_tokens",
            code="invalid_value",
        )
    remaining_ids = ids[begin : begin + room] if side == "right" else ids[end - room : end]
    return [*ids[:begin], *remaining_ids, *ids[end:]], len(ids) - limit


def first_pair_tokens(tokenizer: Tokenizer, text: str, count: int) -> str:
    """Return the beginning of a text, up to `count` tokens.

    Raises:
        APIError: 400, the tokenizer does not support truncation.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise _build_truncation_error()
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = encoded["offset_mapping"]
    return text if len(offsets) <= count else text[: offsets[count - 1][1]]


def _places(encoded: Any, text: int) -> list[int]:
    """Return the indices of the tokens of the first (0) or the second (1) text."""
    if not getattr(encoded, "is_fast", False):
        raise _build_truncation_error()
    return [place for place, owner in enumerate(encoded.sequence_ids(0)) if owner == text]


def _longest_first(first: int, second: int, limit: int) -> list[int]:
    """Return the numbers of kept tokens, as the strategy `longest_first` of `tokenizers` does."""
    if limit < 1:
        raise APIError(
            "the special tokens of a pair of texts leave no room for the texts: choose a larger "
            "truncate_prompt_tokens",
            param="truncate_prompt_tokens",
            code="invalid_value",
        )
    if first + second <= limit:
        return [first, second]
    short, long = sorted((first, second))
    long = max(short, limit - short)
    if short + long > limit:
        short, long = limit // 2, limit - limit // 2
    return [long, short] if first > second else [short, long]


def _build_truncation_error() -> APIError:
    return APIError(
        "the tokenizer of this model cannot truncate texts: send shorter texts",
        code="unsupported_value",
    )
