"""Tokens of texts in parts: lists of words with labels, and pairs of texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ed_data.errors import DataError
from ed_data.schema import Content
from ed_data.tokens.items import DocumentField, TokenSequence, append_eos, with_blame

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def by_words(
    tokenizer: PreTrainedTokenizerBase, items: list[DocumentField], eos: int, *, special: bool
) -> list[TokenSequence]:
    """Return the tokens of lists of words, and the first token of each word.

    Args:
        tokenizer: a fast tokenizer of transformers.
        items: the lists of words.
        eos: id that ends each document.
        special: whether the tokenizer adds its special tokens.

    Raises:
        DataError: the tokenizer is slow, or it cannot encode the words.
    """
    if not tokenizer.is_fast:
        raise DataError(
            f"{type(tokenizer).__name__} does not report the word of each token: use a fast "
            "tokenizer for rows with words"
        )

    def encode(items: list[DocumentField]) -> list[TokenSequence]:
        words: list[Any] = [item.content for item in items]
        encoding = tokenizer(
            words, is_split_into_words=True, add_special_tokens=special, verbose=False
        )
        result = []
        for number, (ids, inside) in enumerate(zip(encoding["input_ids"], words, strict=True)):
            places = [-1] * len(inside)
            for place, word in enumerate(encoding.word_ids(number)):
                if word is not None and places[word] < 0:
                    places[word] = place
            result.append(TokenSequence(append_eos(ids, eos), places=tuple(places)))
        return result

    return with_blame(encode, items, "the tokenizer cannot encode the words")


def in_pairs(
    tokenizer: PreTrainedTokenizerBase,
    items: list[DocumentField],
    seconds: list[Content],
    eos: int,
    max_length: int | None,
) -> list[TokenSequence]:
    """Return the tokens of pairs of texts with their token types.

    The types are 0 if the model of the tokenizer has none.

    Args:
        tokenizer: a tokenizer of transformers.
        items: the first texts.
        seconds: the second texts.
        eos: id that ends each document.
        max_length: number of tokens at which the longer text of a pair is truncated, or None.

    Raises:
        DataError: a field is not a text, or the tokenizer cannot encode a text.
    """
    pairs = _pairs(items, seconds)
    has_types = "token_type_ids" in tokenizer.model_input_names

    def encode(pairs: list[DocumentField]) -> list[TokenSequence]:
        texts: list[Any] = [pair.content for pair in pairs]
        encoding = tokenizer(
            [first for first, _ in texts],
            [second for _, second in texts],
            truncation="longest_first" if max_length is not None else False,
            max_length=max_length,
            return_token_type_ids=True,
            verbose=False,
        )
        result = []
        for ids, types in zip(encoding["input_ids"], encoding["token_type_ids"], strict=True):
            result.append(_build_pair(ids, types, eos, has_types=has_types))
        return result

    return with_blame(encode, pairs, "the tokenizer cannot encode the texts")


def _pairs(items: list[DocumentField], seconds: list[Content]) -> list[DocumentField]:
    """Return fields with both texts of each pair."""
    pairs: list[DocumentField] = []
    for item, second in zip(items, seconds, strict=True):
        if not isinstance(item.content, str) or not isinstance(second, str):
            raise DataError(
                f"{item.location}: both fields of a pair must be texts; correct the row, or drop "
                "it "
                "in format_callback"
            )
        pairs.append(item._replace(content=[item.content, second]))
    return pairs


def _build_pair(ids: list[int], types: list[int], eos: int, *, has_types: bool) -> TokenSequence:
    """Return the tokens of a pair with their types."""
    document_ids = append_eos(ids, eos)
    types = (
        types + types[-1:] * (len(document_ids) - len(ids))
        if has_types
        else [0] * len(document_ids)
    )
    return TokenSequence(document_ids, types=tuple(types))


class ContextWindow(NamedTuple):
    """A window of the second text of a pair, with the first text before it.

    Attributes:
        sequence: the tokens of the pair.
        offsets: first and last character of each token in the second text; None for other tokens.
        pair: number of the pair.
    """

    sequence: TokenSequence
    offsets: list[tuple[int, int] | None]
    pair: int


def windows(
    tokenizer: PreTrainedTokenizerBase,
    items: list[DocumentField],
    seconds: list[Content],
    eos: int,
    max_length: int,
    stride: int,
) -> list[ContextWindow]:
    """Return the windows of pairs of texts, in order; only the second text is divided.

    Args:
        tokenizer: a fast tokenizer of transformers.
        items: the first texts.
        seconds: the second texts.
        eos: id that ends each window.
        max_length: number of tokens of a window.
        stride: number of tokens of the second text that consecutive windows share.

    Raises:
        DataError: the tokenizer is slow, a field is not a text, or a first text leaves no room.
    """
    if not tokenizer.is_fast:
        raise DataError(
            f"{type(tokenizer).__name__} does not report the characters of each token: use a fast "
            "tokenizer for questions about a context"
        )
    pairs = _pairs(items, seconds)
    has_types = "token_type_ids" in tokenizer.model_input_names
    ends = tokenizer("a", "b")["input_ids"][-1:] == [eos]
    room = max_length if ends else max_length - 1

    def encode(pairs: list[DocumentField]) -> list[list[ContextWindow]]:
        texts: list[Any] = [pair.content for pair in pairs]
        encoding = tokenizer(
            [first for first, _ in texts],
            [second for _, second in texts],
            truncation="only_second",
            max_length=room,
            stride=stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_token_type_ids=True,
            verbose=False,
        )
        result: list[list[ContextWindow]] = [[] for _ in pairs]
        for number, pair in enumerate(encoding["overflow_to_sample_mapping"]):
            ids, types = encoding["input_ids"][number], encoding["token_type_ids"][number]
            sequence = _build_pair(ids, types, eos, has_types=has_types)
            text_numbers = [
                *encoding.sequence_ids(number),
                *[None] * (len(sequence.ids) - len(ids)),
            ]
            places = [
                *encoding["offset_mapping"][number],
                *[(0, 0)] * (len(sequence.ids) - len(ids)),
            ]
            offsets = [
                place if of == 1 else None for of, place in zip(text_numbers, places, strict=True)
            ]
            result[pair].append(ContextWindow(sequence, offsets, pair))
        return result

    problem = "the tokenizer cannot encode the texts, or the question leaves no room for a window"
    windows_by_pair = with_blame(encode, pairs, problem)
    return [window for pair_windows in windows_by_pair for window in pair_windows]


def mark_answer(window: ContextWindow, cls: int | None, answer: tuple[int, int]) -> TokenSequence:
    """Return the tokens of a window with the tokens of an answer.

    Without an answer in the window, the answer is the classification token, or the first token.

    Args:
        window: the window.
        cls: id of the classification token.
        answer: first character of the answer and the character after it; negative: no answer.
    """
    ids, inside = window.sequence.ids, [i for i, o in enumerate(window.offsets) if o is not None]
    none = ids.index(cls) if cls in ids else 0
    start, stop = answer
    context_offsets = [window.offsets[i] or (0, 0) for i in inside]
    if (
        start < 0
        or not context_offsets
        or context_offsets[0][0] > start
        or context_offsets[-1][1] < stop
    ):
        return window.sequence._replace(span=(none, none))
    first = max(i for i, place in zip(inside, context_offsets, strict=True) if place[0] <= start)
    last = min(i for i, place in zip(inside, context_offsets, strict=True) if place[1] >= stop)
    return window.sequence._replace(span=(first, max(first, last)))
