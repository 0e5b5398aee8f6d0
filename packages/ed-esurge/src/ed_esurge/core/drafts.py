"""Drafts in a plan: which rows receive proposed tokens, and what rejected tokens change.

A row with proposals contains known tokens and proposed tokens (`PlanRow.samples`). The sampled
tokens accept or reject the proposals (`ed_esurge.core.proposals`). Keys and values of rejected
tokens need no repair, because the next tokens overwrite them. A recurrent state is the sum of all
tokens before it. The repair of states works so:

- A sequence has two slots for its state. A step with proposals reads one and writes the other.
- If all proposals were accepted, the sequence continues from the written slot.
- Otherwise the sequence continues from the slot that was read. The next row computes the accepted
  tokens again, together with its new token and new proposals.

No state is copied. The alternative, a slot for the state after each proposed token, would store and
write `num_speculative_tokens + 1` states for each sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

from ed_esurge.core.pages import PageTables
from ed_esurge.core.plan import PlanRow
from ed_esurge.core.proposals import Proposer
from ed_esurge.core.request import Request
from ed_esurge.core.state_store import StateStore
from ed_esurge.sampling import SamplingParams


class DraftPlanner:
    """Adds proposals to the rows of plans.

    Args:
        proposer: source of the proposed tokens.
        pages: page tables of the sequences.
        states: saved states of recurrent layers, if any.
        second_states: number of the first of `max_num_seqs` further slots of recurrent states;
            None = the model has no recurrent layers.
    """

    def __init__(
        self,
        proposer: Proposer,
        pages: PageTables,
        states: StateStore | None,
        second_states: int | None,
    ) -> None:
        self.proposer, self._pages = proposer, pages
        self._states, self._second_states = states, second_states

    def computes_again(self, request: Request, missing: int) -> bool:
        """Return whether the next row of a request computes accepted tokens again.

        Args:
            missing: number of tokens of the request that are not computed, more than 1.
        """
        if self._second_states is None or request.num_computed < len(request.prompt):
            return False
        return missing <= self.proposer.most + 1

    def shares_later(self, request: Request) -> bool:
        """Return whether a row shares the pages that it fills after its step: the next row may
        write them again."""
        return self._second_states is not None and request.num_computed >= len(request.prompt)

    def add_proposals(
        self,
        rows: MutableMapping[str, PlanRow],
        requests: Mapping[str, Request],
        *,
        budget: int,
        free_rows: int,
    ) -> None:
        """Add proposals to the rows of decoding sequences. Each proposal uses a row and a token.

        Args:
            rows: rows of a plan.
            requests: the requests by id.
            budget, free_rows: number of tokens and of rows that the step can add.
        """
        free = min(budget, free_rows)
        for name, row in rows.items():
            request, count = requests[name], len(row.token_ids)
            if free <= 0:
                return
            if row.samples != 1 or not has_drafts(request):
                continue
            if count > 1 and not self.computes_again(request, count):
                continue  # a prompt
            remaining_tokens = request.max_tokens - len(request.output) - 1
            most = min(self.proposer.get_limit(request), free, remaining_tokens)
            most = min(most, self._pages.at_once - count)
            if self._states is not None:
                # The step ends at the next state to save, and not after it.
                most = self._states.count_steps([row.start], count + most) - count
            proposed = self.proposer.propose(request, most) if most > 0 else ()
            if not proposed:
                continue
            new_pages = self._pages.reserve(request, count + len(proposed))
            if new_pages is None:
                continue
            rows[name] = row.append_pages(new_pages)._replace(
                token_ids=[*row.token_ids, *proposed], samples=1 + len(proposed)
            )
            free -= len(proposed)

    def reserve_drafts(
        self, rows: MutableMapping[str, PlanRow], requests: Mapping[str, Request]
    ) -> None:
        """Reserve pages for the tokens that a draft model drafts after a step, as far as pages are
        free. Without them, a draft ends at the end of a page."""
        for name, row in rows.items() if self.proposer.reserved_tokens else ():
            request, count = requests[name], len(row.token_ids)
            if not row.samples or not has_drafts(request):
                continue
            longest = len(request.prompt) + request.max_tokens
            ahead = min(self.proposer.reserved_tokens, longest - row.stop)
            ahead = min(ahead, self._pages.at_once - count)
            new_pages = self._pages.reserve(request, count + ahead) if ahead > 0 else None
            if new_pages:
                rows[name] = row.append_pages(new_pages)

    def place_states(
        self, rows: MutableMapping[str, PlanRow], requests: Mapping[str, Request]
    ) -> None:
        """Set the slots of the recurrent states of the rows of a plan."""
        if self._second_states is None:
            return
        for name, row in rows.items():
            source = requests[name].state_slot
            assert source is not None, "a running request has a slot"
            target = source
            if row.samples > 1:
                target = row.slot + self._second_states if source == row.slot else row.slot
            if (source, target) != (row.slot, row.slot):
                rows[name] = row._replace(states=(source, target))

    def settle(self, request: Request, row: PlanRow, sampled: Sequence[int], taken: int) -> None:
        """Process the results of a row that samples. `Request.take` has appended the tokens.

        Args:
            sampled: accepted tokens of the row, at least one.
            taken: number of appended tokens. A request ends before the tokens after its end.
        """
        if row.samples > 1:
            self.proposer.count(request, row.samples - 1, min(len(sampled) - 1, taken))
            if self._second_states is not None:
                if len(sampled) < row.samples:
                    request.num_computed = row.start
                    return
                assert row.states is not None, "a row with proposals changes the slot"
                request.state_slot = row.states[1]
        start = row.start if self.shares_later(request) else row.known
        self._pages.share(request, start, request.num_computed)


def has_drafts(request: Request) -> bool:
    """Return whether a request may receive proposals: no beams, and no filters that depend on the
    tokens before."""
    params = request.params
    if request.branches or not isinstance(params, SamplingParams):
        return False
    return not params.mirostat and not (params.filtered and request.adjusted)
