"""The tokens of documents as arrays: the result of `Encoder`, which caches store."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
_NO_MASK, _NO_VALUES = np.empty(0, np.uint8), np.empty((0, 0), np.float32)


class SequenceArrays(NamedTuple):
    """The arrays of one sequence.

    Attributes:
        tokens: [tokens].
        mask: [tokens] 1 for tokens with loss; empty if every token has loss.
        values: [tokens, values]; empty if the schema has no values.
    """

    tokens: NDArray[np.int32]
    mask: NDArray[np.uint8]
    values: NDArray[np.float32]

    def part(self, start: int, stop: int) -> SequenceArrays:
        """Return the tokens `start` to `stop` (exclusive)."""
        part = slice(start, stop)
        return SequenceArrays(self.tokens[part], self.mask[part], self.values[part])


class EncodedDocuments(NamedTuple):
    """The tokens of some documents.

    Attributes:
        tokens: one array for each column of each document, document after document.
        masks: 1 for tokens with loss, in the same order; None if every token has loss.
        digests: `Example.digest` of each document.
        contents: `Example.content_digest` of each document; None if they equal the digests.
        values: float32 [tokens, values] of each sequence, see `schema.Value`; None if the schema
            has no values.
    """

    tokens: list[NDArray[np.int64]]
    masks: list[NDArray[np.uint8]] | None
    digests: list[int]
    contents: list[int] | None = None
    values: list[NDArray[np.float32]] | None = None

    def sequences(self) -> list[SequenceArrays]:
        """Return the arrays of each sequence, in the order of `tokens`."""
        masks = self.masks or [_NO_MASK] * len(self.tokens)
        values = self.values or [_NO_VALUES] * len(self.tokens)
        return [
            SequenceArrays(ids.astype(np.int32), mask.astype(np.uint8), value)
            for ids, mask, value in zip(self.tokens, masks, values, strict=True)
        ]
