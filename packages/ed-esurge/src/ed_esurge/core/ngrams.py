"""Prompt lookup: proposes the tokens that followed an earlier occurrence of an n-gram.

The definition is that of https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

from ed_esurge.config import SpeculativeConfig
from ed_esurge.core.proposals import DraftKind, Proposer
from ed_esurge.core.request import Request


class NgramIndex:
    """Index of the last positions of n-grams in one sequence.

    Args:
        longest, shortest: range of the n-gram lengths. The longest match is used.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> the position after it
        self._indexed = 0  # n-grams that end before this position are in the table

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the sequence."""
        self._tokens += tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def propose(self, most: int) -> list[int]:
        """Return at most `most` proposed tokens; [] without a match."""
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
                    # The continuation may include the proposals themselves, as in a repetition.
                    proposed: list[int] = []
                    for at in range(place, place + most):
                        proposed.append(tokens[at] if at < end else proposed[at - end])
                    return proposed
        return []


class PromptLookup(Proposer):
    """Proposes the tokens that followed an earlier occurrence of a sequence's last tokens.

    Args:
        config: options with `method: ngram`.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        super().__init__(config.num_speculative_tokens, adapts=config.adaptive_length)
        self._config = config
        self._known: dict[str, NgramIndex] = {}

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """See `Proposer`."""
        index = self._known.get(request.request_id)
        if index is None:
            config = self._config
            index = NgramIndex(config.prompt_lookup_max, config.prompt_lookup_min)
            self._known[request.request_id] = index
        index.extend(request.tokens(len(index), request.num_tokens))
        return index.propose(most)

    def forget(self, request: Request) -> None:
        """See `Proposer`."""
        self._known.pop(request.request_id, None)


NGRAM_KIND = DraftKind(PromptLookup)
