"""Tokens of texts in parts: lists of words with labels, and pairs of texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ed_data.errors import DataError
from ed_data.schema import Content
from ed_data.tokens.items import DocumentField, TokenSequence, ended, with_blame

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
        made = tokenizer(words, is_split_into_words=True, add_special_tokens=special, verbose=False)
        result = []
        for number, (ids, inside) in enumerate(zip(made["input_ids"], words, strict=True)):
            places = [-1] * len(inside)
            for place, word in enumerate(made.word_ids(number)):
                if word is not None and places[word] < 0:
                    places[word] = place
            result.append(TokenSequence(ended(ids, eos), places=tuple(places)))
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
    pairs: list[DocumentField] = []
    for item, second in zip(items, seconds, strict=True):
        if not isinstance(item.content, str) or not isinstance(second, str):
            raise DataError(
                f"{item.where}: both fields of a pair must be texts; correct the row, or drop it "
                "in format_callback"
            )
        pairs.append(item._replace(content=[item.content, second]))
    has_types = "token_type_ids" in tokenizer.model_input_names

    def encode(pairs: list[DocumentField]) -> list[TokenSequence]:
        texts: list[Any] = [pair.content for pair in pairs]
        made = tokenizer(
            [first for first, _ in texts],
            [second for _, second in texts],
            truncation="longest_first" if max_length is not None else False,
            max_length=max_length,
            return_token_type_ids=True,
            verbose=False,
        )
        result = []
        for ids, types in zip(made["input_ids"], made["token_type_ids"], strict=True):
            whole = ended(ids, eos)
            types = types + types[-1:] * (len(whole) - len(ids)) if has_types else [0] * len(whole)
            result.append(TokenSequence(whole, types=tuple(types)))
        return result

    return with_blame(encode, pairs, "the tokenizer cannot encode the texts")
