"""Inputs and outputs of the encoders: fields of documents, and sequences of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ed_data.errors import DataError
from ed_data.schema import Content

T = TypeVar("T")


class DocumentField(NamedTuple):
    """One field of one document, its location for messages, and arguments of the chat template."""

    content: Content
    where: str
    template: Mapping[str, Any] = MappingProxyType({})


class TokenSequence(NamedTuple):
    """One sequence of tokens.

    Attributes:
        ids: the tokens.
        mask: 1 for tokens with loss; None if every token has loss.
        prompt: number of tokens at the beginning that have no loss in any case.
        places: index of the token with the value of each step or word; -1: there is none.
        types: token types of a pair of texts.
        span: first and last token of an answer.
    """

    ids: list[int]
    mask: list[int] | None = None
    prompt: int = 0
    places: tuple[int, ...] = ()
    types: tuple[int, ...] = ()
    span: tuple[int, int] | None = None

    def with_images(self, token: int, counts: Sequence[int]) -> TokenSequence:
        """Repeat the placeholder of each image once per feature of the image; they have no loss.

        Args:
            token: id of the placeholder, which occurs once for each image.
            counts: number of features of each image.
        """
        ids = np.asarray(self.ids, np.int64)
        repeats = np.ones(len(ids), np.int64)
        repeats[ids == token] = counts
        expanded = np.repeat(ids, repeats)
        mask = np.repeat(np.ones(len(ids), np.int64) if self.mask is None else self.mask, repeats)
        mask[expanded == token] = 0
        prompt = int(repeats[: self.prompt].sum())
        return TokenSequence(expanded.tolist(), mask.tolist(), prompt, self.places)


def ended(ids: list[int], eos: int) -> list[int]:
    """Return the tokens of a document, which end with `eos`."""
    return ids if ids[-1:] == [eos] else [*ids, eos]


def with_blame(
    call: Callable[[list[DocumentField]], list[T]], items: list[DocumentField], problem: str
) -> list[T]:
    """Call the function with all items; if it fails, find the row that causes the error."""
    try:
        return call(items)
    except Exception as error:  # a template may raise any error, of jinja or of Python
        blamed, reason = items[0], error
        for item in items:
            try:
                call([item])
            except Exception as own:
                blamed, reason = item, own
                break
        raise DataError(
            f"{blamed.where}: {problem}: {reason}; correct the row, or drop it in format_callback"
        ) from error
