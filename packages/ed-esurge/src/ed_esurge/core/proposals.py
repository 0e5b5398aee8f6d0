"""Tokens that are proposed for a sequence before the model has computed them.

A proposal is never taken on trust: the step that computes it samples the token before it, too, with
the noise of that position (`ed_esurge.runner.sampler`), and only an equal token confirms it. So a
request's tokens are those without proposals, whatever is proposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from tqdm import tqdm

from ed_esurge.config import SpeculativeConfig
from ed_esurge.core.ngram import NgramIndex
from ed_esurge.core.plan import StepPlan
from ed_esurge.core.request import Request


class Proposer:
    """Proposes no tokens; those that do derive from it. Counts what became of them.

    Args:
        most: proposals for a sequence in one step.

    Attributes:
        num_drafts: times that something was proposed.
        num_draft_tokens, num_accepted_tokens: proposals, and those that were confirmed.
        accepted_per_pos: the latter by their place among the proposals of a step.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self.accepted_per_pos = [0] * most

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """At most so many tokens that may follow those of a request."""
        return ()

    def forget(self, request: Request) -> None:
        """The request has ended."""

    def observe(self, plan: StepPlan, requests: Mapping[str, Request]) -> None:
        """A step was taken.

        Args:
            requests: those that have not ended, by id.
        """

    def compile_all(self, progress: tqdm[NoReturn]) -> None:
        """Compile what the device will be asked for."""

    def free(self) -> None:
        """Give memory of the device back."""

    def allocate(self) -> None:
        """Take it again."""

    def count(self, proposed: int, accepted: int) -> None:
        """Note the fate of a step's proposals for one sequence."""
        self.num_drafts += 1
        self.num_draft_tokens += proposed
        self.num_accepted_tokens += accepted
        for place in range(accepted):
            self.accepted_per_pos[place] += 1

    def stats(self) -> dict[str, float]:
        """The counters, as vLLM's metrics call them."""
        places = enumerate(self.accepted_per_pos)
        return {
            "spec_decode_num_drafts": self.num_drafts,
            "spec_decode_num_draft_tokens": self.num_draft_tokens,
            "spec_decode_num_accepted_tokens": self.num_accepted_tokens,
            **{f"spec_decode_num_accepted_tokens_per_pos_{at}": count for at, count in places},
        }


class PromptLookup(Proposer):
    """Proposes what followed a sequence's last tokens where they stood before.

    Args:
        config: with `method: ngram`.
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
