"""DRY: a penalty for tokens that would continue a repetition of earlier text.

The definition is that of llama.cpp and of the original proposal
(https://github.com/oobabooga/text-generation-webui/pull/5677).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

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

    def of(self, tokens: Sequence[int]) -> dict[int, float]:
        """Return the penalty of each token that would continue a repetition of the last tokens.

        The time is proportional to the number of tokens (the Z algorithm on the reversed tokens).
        """
        last = tokens if self.last_n is None else tokens[max(0, len(tokens) - self.last_n) :]
        lengths = longest_repetitions(last, self.breakers)
        most = math.inf
        if self.base > 1:
            spare = MAX_EXPONENT_BITS - math.log2(max(self.multiplier, 1.0))
            most = spare / math.log2(self.base)
        return {
            token: self.multiplier * self.base ** min(length - self.allowed_length, most)
            for token, length in lengths.items()
            if length >= self.allowed_length
        }


def longest_repetitions(tokens: Sequence[int], breakers: Collection[int]) -> dict[int, int]:
    """Return, for each token that followed an earlier occurrence of the last tokens, the length of
    the longest such occurrence. A breaker is part of no occurrence, and follows none."""
    backwards = list(reversed(tokens))
    limit = next((at for at, token in enumerate(backwards) if token in breakers), len(backwards))
    lengths = _matches_of_start(backwards)
    longest: dict[int, int] = {}
    for at in range(1, len(backwards)):
        length = min(lengths[at], limit)
        following = backwards[at - 1]
        if length and following not in breakers:
            longest[following] = max(longest.get(following, 0), length)
    return longest


def _matches_of_start(tokens: list[int]) -> list[int]:
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
    return result
