"""Proposals by prompt look-up: what followed the same tokens before.

The method: https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

from collections.abc import Sequence


class NgramIndex:
    """Where runs of tokens stood last, in one sequence.

    Args:
        longest, shortest: lengths of the runs that are looked up, the longest first.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # a run -> the place after it
        self._indexed = 0  # runs that end before this place are in the table

    def extend(self, tokens: Sequence[int]) -> None:
        """Take the tokens that follow."""
        self._tokens += tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def propose(self, most: int) -> list[int]:
        """What may follow: at most so many tokens, none where nothing is known."""
        tokens, end = self._tokens, len(self._tokens)
        for place in range(self._indexed, end):
            for length in self._lengths:
                if length <= place:
                    self._after[tuple(tokens[place - length : place])] = place
        self._indexed = end
        for length in self._lengths:
            if length <= end:
                place = self._after.get(tuple(tokens[end - length :]))
                if place is not None:
                    # What follows may run into the proposals themselves: a loop goes on.
                    proposed: list[int] = []
                    for at in range(place, place + most):
                        proposed.append(tokens[at] if at < end else proposed[at - end])
                    return proposed
        return []
