"""Speculative decoding: tokens that are proposed before the model has computed them.

Every proposal is verified. The step that computes the proposal also samples the token of its
position, with the noise of that position (`ed_esurge.runner.sampler`). Only an equal token accepts
the proposal. The tokens of a request therefore do not depend on the proposals.

`NgramIndex` proposes the tokens that followed an earlier occurrence of an n-gram (prompt lookup,
https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from tqdm import tqdm

from ed_esurge.config import SpeculativeConfig
from ed_esurge.core.plan import StepPlan
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


#: Request id -> number of tokens of the request, and the tokens that may follow them.
Proposals = dict[str, tuple[int, list[int]]]


class Proposer:
    """Base class of proposers, with statistics of the proposals. Proposes no tokens itself.

    Args:
        most: maximum number of proposals for a sequence in one step.

    Attributes:
        num_drafts: number of steps with proposals, over all sequences.
        num_draft_tokens, num_accepted_tokens: number of proposed and of accepted tokens.
        accepted_per_pos: number of accepted tokens by position among the proposals of a step.
        repeatable: whether every process of an engine computes the same proposals.
    """

    repeatable = True

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self.accepted_per_pos = [0] * most

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Return at most `most` tokens that may follow the tokens of a request."""
        return ()

    def forget(self, request: Request) -> None:
        """Release the data of a finished request."""

    def observe(self, plan: StepPlan, requests: Mapping[str, Request]) -> None:
        """Process a finished step.

        Args:
            plan: the plan of the step.
            requests: the unfinished requests by id.
        """

    def proposals(self) -> Proposals:
        """Return the proposals of a proposer that other processes cannot compute."""
        return {}

    def receive(self, proposals: Proposals) -> None:
        """Replace the proposals by those of another process."""

    def compile_all(self, progress: tqdm[NoReturn]) -> None:
        """Compile the programs of the proposer."""

    def free(self) -> None:
        """Free the device memory of the proposer."""

    def allocate(self) -> None:
        """Allocate the device memory again."""

    def count(self, proposed: int, accepted: int) -> None:
        """Update the statistics with the proposals for one sequence in a step."""
        self.num_drafts += 1
        self.num_draft_tokens += proposed
        self.num_accepted_tokens += accepted
        for place in range(accepted):
            self.accepted_per_pos[place] += 1

    def stats(self) -> dict[str, float]:
        """Return the counters under the names of vLLM's metrics."""
        places = enumerate(self.accepted_per_pos)
        return {
            "spec_decode_num_drafts": self.num_drafts,
            "spec_decode_num_draft_tokens": self.num_draft_tokens,
            "spec_decode_num_accepted_tokens": self.num_accepted_tokens,
            **{f"spec_decode_num_accepted_tokens_per_pos_{at}": count for at, count in places},
        }


class ReceivedProposals(Proposer):
    """Proposes the tokens that another process computed for its replica."""

    repeatable = False

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._received: Proposals = {}

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """See `Proposer`."""
        length, tokens = self._received.get(request.request_id, (0, []))
        return tokens[:most] if length == request.num_tokens else ()

    def receive(self, proposals: Proposals) -> None:
        """See `Proposer`."""
        self._received = proposals


class PromptLookup(Proposer):
    """Proposes the tokens that followed an earlier occurrence of a sequence's last tokens.

    Args:
        config: options with `method: ngram`.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        super().__init__(config.num_speculative_tokens)
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
