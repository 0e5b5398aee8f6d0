"""Speculative decoding: tokens that are proposed before the model has computed them.

Every proposal is verified. The step that computes the proposal also samples the token of its
position, with the noise of that position (`ed_esurge.runner.sampler`). Only an equal token accepts
the proposal. The tokens of a request therefore do not depend on the proposals.

A kind of proposals is a record `DraftKind` in a file of its own; `ed_esurge.runner.drafts`
lists all. `DraftLength` chooses the number of proposals for each request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from tqdm import tqdm

from ed_esurge.config import SpeculativeConfig
from ed_esurge.core.plan import StepPlan
from ed_esurge.core.request import Request

#: Request id -> number of tokens of the request, and the tokens that may follow them.
Proposals = dict[str, tuple[int, list[int]]]

#: Average share of accepted proposals below which a request receives none for some tokens. On a
#: CPU, a step with one, three proposed tokens of an MTP layer takes 1.24, 1.58 of the processor
#: time of a plain step (SmolLM2-135M, one sequence). A few rejections are no reason for a pause.
LEAST_ACCEPTANCE = 0.15
#: Steps over which the usual acceptance of all requests is averaged.
USUAL_STEPS = 32
#: Number of tokens of the first and of the longest pause. Each pause is twice as long as the last.
FIRST_PAUSE, LONGEST_PAUSE = 16, 256
#: Maximum number of stored hidden states that one step of a draft model reads: those of a sequence
#: after the longest pause.
RESTORED_ROWS = 2 * LONGEST_PAUSE


class DraftLength:
    """The number of proposals of one request, from the acceptance of its last proposals.

    The number grows by one after a step in which all proposals were accepted, and falls to one more
    than the accepted proposals otherwise. If few proposals are accepted on average, the request has
    no proposals for a number of tokens, and then a trial.

    Args:
        most: maximum number of proposals in one step.
        usual: average acceptance of earlier requests. The first number is 1 if it is small.
    """

    def __init__(self, most: int, usual: float = 0.5) -> None:
        self._most, self._length = most, most if usual > 1.5 * LEAST_ACCEPTANCE else 1
        self._acceptance = 0.5 if self._length == most else LEAST_ACCEPTANCE
        self._pause, self._resume = FIRST_PAUSE, 0

    def get(self, num_tokens: int) -> int:
        """Return the maximum number of proposals after `num_tokens` tokens of the request."""
        return self._length if num_tokens >= self._resume else 0

    def update(self, proposed: int, accepted: int, num_tokens: int) -> bool:
        """Process the result of a step, after which the request has `num_tokens` tokens.

        Returns:
            whether a pause begins.
        """
        self._acceptance += (accepted / proposed - self._acceptance) / 8
        if accepted == proposed:
            self._length = min(max(self._length, proposed) + 1, self._most)
        else:
            self._length = min(accepted + 1, self._most)
        if self._acceptance > 1.5 * LEAST_ACCEPTANCE:
            self._pause = FIRST_PAUSE
        if self._acceptance >= LEAST_ACCEPTANCE:
            return False
        self._resume, self._acceptance = num_tokens + self._pause, LEAST_ACCEPTANCE
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return True


class Proposer:
    """Base class of proposers, with statistics of the proposals. Proposes no tokens itself.

    Args:
        most: maximum number of proposals for a sequence in one step.
        adapts: whether the number of proposals follows their acceptance; see `DraftLength`.

    Attributes:
        num_drafts: number of steps with proposals, over all sequences.
        num_pauses: number of times that a sequence stopped to receive proposals.
        num_draft_tokens, num_accepted_tokens: number of proposed and of accepted tokens.
        accepted_per_pos: number of accepted tokens by position among the proposals of a step.
        repeatable: whether every process of an engine computes the same proposals.
        reserved_tokens: number of tokens after a step for which the proposer needs pages.
    """

    repeatable = True
    reserved_tokens = 0

    def __init__(self, most: int, *, adapts: bool = False) -> None:
        self.most, self._adapts = most, adapts
        self._lengths: dict[str, DraftLength] = {}
        self._usual = 0.5
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = self.num_pauses = 0
        self.accepted_per_pos = [0] * most

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Return at most `most` tokens that may follow the tokens of a request."""
        return ()

    def forget(self, request: Request) -> None:
        """Release the data of a finished request."""

    def release(self, request: Request) -> None:
        """Release all data of a finished request."""
        self._lengths.pop(request.request_id, None)
        self.forget(request)

    def get_limit(self, request: Request) -> int:
        """Return the maximum number of proposals of a request in the next step."""
        if not self._adapts:
            return self.most
        return self._find_length(request).get(request.num_tokens)

    def _find_length(self, request: Request) -> DraftLength:
        return self._lengths.get(request.request_id) or DraftLength(self.most, self._usual)

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

    def count(self, request: Request, proposed: int, accepted: int) -> None:
        """Process the result of the proposals for one sequence in a step."""
        if self._adapts:
            length = self._lengths[request.request_id] = self._find_length(request)
            self._usual += (accepted / proposed - self._usual) / USUAL_STEPS
            self.num_pauses += length.update(proposed, accepted, request.num_tokens)
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
            "spec_decode_num_pauses": self.num_pauses,
            **{f"spec_decode_num_accepted_tokens_per_pos_{at}": count for at, count in places},
        }


class ReceivedProposals(Proposer):
    """Proposes the tokens that another process computed for its replica."""

    repeatable = False

    def __init__(self, most: int, *, adapts: bool = False) -> None:
        super().__init__(most, adapts=adapts)
        self.reserved_tokens = most
        self._received: Proposals = {}

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """See `Proposer`."""
        length, tokens = self._received.get(request.request_id, (0, []))
        return tokens[:most] if length == request.num_tokens else ()

    def receive(self, proposals: Proposals) -> None:
        """See `Proposer`."""
        self._received = proposals


@dataclass(frozen=True)
class DraftKind:
    """A source of proposals.

    Attributes:
        create: creates the proposer from the options; None = the kind has a draft model.
        follow: creates the proposer of a kind with a draft model from the runner of the draft
            model, the runner of the served model, the options, and the maximum number of tokens in
            a step.
        derive: returns the draft model from the served model and the options, with arrays of that
            model; None = the user names the draft model.
        reads_hidden: whether the draft model reads the hidden states of the served model.
        config_fields: fields of the configuration with which the served model is loaded.
    """

    create: Callable[[SpeculativeConfig], Proposer] | None
    follow: Callable[..., Proposer] | None = None
    derive: Callable[..., object] | None = None
    reads_hidden: bool = False
    config_fields: Mapping[str, str] = field(default_factory=dict)
