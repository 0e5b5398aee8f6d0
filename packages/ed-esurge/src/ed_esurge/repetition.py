"""DRY: a penalty for tokens that would continue a repetition of earlier text.

The definition is that of llama.cpp and of the original proposal
(https://github.com/oobabooga/text-generation-webui/pull/5677).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: Largest exponent of a penalty, so that penalties are finite float32 numbers.
MAX_EXPONENT_BITS = 127.0


@dataclass(frozen=True)
class RepetitionPenalty:
    """The options of DRY.

    Attributes:
        multiplier: penalty of a repetition of `allowed_length` tokens.
        base: factor of the penalty for each further token.
        allowed_length: length of a repetition without a penalty, plus one.
        last_n: number of last tokens that are searched; None = all.
        breakers: tokens at which a repetition ends.
    """

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    last_n: int | None = None
    breakers: frozenset[int] = frozenset()


class Repetitions:
    """Earlier occurrences of the last tokens of a growing sequence.

    A new token costs one vectorized operation over the searched tokens.

    Args:
        penalty: the options.
        tokens: the first tokens of the sequence.
    """

    def __init__(self, penalty: RepetitionPenalty, tokens: Sequence[int]) -> None:
        self._penalty = penalty
        self._breakers = np.array(sorted(penalty.breakers), np.int64)
        self._count = len(tokens)
        self._tokens = np.zeros(2 * self._count + 64, np.int64)
        self._tokens[: self._count] = tokens
        # Number of tokens up to each position that equal the last tokens of the sequence.
        self._lengths = np.zeros_like(self._tokens)
        start = self._start(self._count)
        backwards = list(reversed(tokens[start:]))
        limit = next((at for at, x in enumerate(backwards) if x in penalty.breakers), len(tokens))
        matches = np.minimum(_matches_of_start(backwards), limit)
        self._lengths[start : self._count] = matches[::-1]

    def append(self, token: int) -> None:
        """Append a token to the sequence."""
        count = self._count
        if count == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
            self._lengths = np.concatenate([self._lengths, np.zeros_like(self._lengths)])
        start = self._start(count)
        earlier, lengths = self._tokens[start:count], self._lengths[start:count]
        longer = np.zeros_like(lengths)
        if token not in self._penalty.breakers:
            longer[1:] = lengths[:-1]
            longer = np.where(earlier == token, longer + 1, 0)
        lengths[:] = longer
        self._tokens[count] = token
        self._count += 1

    def penalties(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens that would continue a repetition, int64 [k], and their penalties,
        float64 [k]."""
        options, start, last = self._penalty, self._start(self._count), self._count - 1
        inside = np.arange(1, max(last - start, 0) + 1)
        lengths = np.minimum(self._lengths[start : max(last, start)], inside)
        places = np.flatnonzero(lengths >= options.allowed_length)
        following, index = np.unique(self._tokens[start + places + 1], return_inverse=True)
        longest = np.zeros(len(following), np.int64)
        np.maximum.at(longest, index, lengths[places])
        keep_mask = ~np.isin(following, self._breakers)
        most = math.inf
        if options.base > 1:
            spare_bits = MAX_EXPONENT_BITS - math.log2(max(options.multiplier, 1.0))
            most = spare_bits / math.log2(options.base)
        exponents = np.minimum(longest[keep_mask] - options.allowed_length, most)
        return following[keep_mask], options.multiplier * options.base**exponents

    def _start(self, count: int) -> int:
        """Return the first searched position of `count` tokens."""
        last_n = self._penalty.last_n
        return 0 if last_n is None else max(0, count - last_n)


def _matches_of_start(tokens: list[int]) -> np.ndarray:
    """Return for each position how many tokens equal the tokens of the start (the Z function)."""
    count = len(tokens)
    result = [0] * count
    left = right = 0
    for at in range(1, count):
        length = min(right - at, result[at - left]) if at < right else 0
        while at + length < count and tokens[length] == tokens[at + length]:
            length += 1
        result[at] = length
        if at + length > right:
            left, right = at, at + length
    return np.array(result, np.int64)
