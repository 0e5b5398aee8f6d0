"""What one step computes: the scheduler's product, in plain numbers.

A plan is complete: whoever holds the weights and the plans so far can run it, in another process
too. It tells what is new alone. A sequence comes with all of its data when it takes a slot
(`NewSequence`), and its rows then bring the tokens and the pages of one step (`PlanRow`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ed_esurge.sampling import PoolingParams, SamplingParams

#: Group -> `(saves, loads)`: place in host memory -> page of the device, and page -> place.
Moves = Mapping[str, tuple[Mapping[int, int], Mapping[int, int]]]

#: Tokens of a row that decodes what the last step has sampled for its slot, which nobody has read.
UNREAD = (-1,)


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that takes a slot: what the runner must know until another takes the slot.

    Attributes:
        request_id: whose.
        slot: the number that the sequence leases while it runs: its place in the runner's tables
            and in the sampler's state, and the place of its recurrent state.
        token_ids: all tokens known so far: the prompt, and after a preemption the output too.
        prompt_len: how many of them are the prompt.
        params: how to sample, or what to pool.
        seed: 32-bit seed of its sampling keys.
        end_token_ids: ids that may not be sampled before `min_tokens` tokens.
        bad_token_ids: token sequences that may not be generated.
        adapter: number of its LoRA adapter; 0 = none.
    """

    request_id: str
    slot: int
    token_ids: Sequence[int]
    prompt_len: int
    params: SamplingParams | PoolingParams
    seed: int = 0
    end_token_ids: tuple[int, ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    adapter: int = 0


class PlanRow(NamedTuple):
    """One sequence's share of a step.

    Attributes:
        request_id: whose.
        slot: the slot of the sequence.
        start: position of the first token computed; equals the number of cached tokens.
        token_ids: tokens computed: one for a decode, more for (a chunk of) a prompt. The last
            `samples - 1` of them are proposals, which the sampled tokens confirm or not. `UNREAD`:
            see there.
        pages: group -> page numbers that continue the sequence's page table; only groups that
            have new ones.
        samples: tokens to sample, after the last one that is known and after each proposal; 0
            before the end of what is known.
        scores: the step gives the log-probability of each next prompt token.
        pools: the hidden states are pooled; the vector comes out with the end of the prompt.
    """

    request_id: str
    slot: int
    start: int
    token_ids: Sequence[int]
    pages: Mapping[str, Sequence[int]]
    samples: int = 0
    scores: bool = False
    pools: bool = False

    @property
    def stop(self) -> int:
        """Position after the last token computed."""
        return self.start + len(self.token_ids)

    @property
    def known(self) -> int:
        """Position after the last token that is no proposal."""
        return self.start + len(self.token_ids) - max(self.samples - 1, 0)

    def confirmed(self, sampled: Sequence[int]) -> list[int]:
        """The tokens that follow for sure: each but the first came after a proposal that was right.

        Args:
            sampled: `samples` tokens.
        """
        proposed = self.token_ids[len(self.token_ids) - self.samples + 1 :]
        right = 0
        for token, proposal, following in zip(sampled, proposed, sampled[1:], strict=False):
            if token != proposal or following < 0:
                break  # -1 is no token: whoever samples there again is told so first
            right += 1
        return list(sampled[: right + 1])


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The rows of one step, and who lost its pages to make them possible.

    Attributes:
        step: running number; a plan that is made ahead has that of the step before.
        rows: at most `max_num_seqs`; their tokens are at most the token budget.
        started: sequences that have a row for the first time since they took their slot.
        preempted: requests that went back to the queue while this step was planned.
        moves: what is copied between the device and host memory before; all saves come first.
        ahead: the rows are `UNREAD`; see `ed_esurge.core.ahead`.
    """

    step: int
    rows: tuple[PlanRow, ...]
    started: tuple[NewSequence, ...] = ()
    preempted: tuple[str, ...] = ()
    moves: Moves = field(default_factory=dict)
    ahead: bool = False

    @property
    def num_tokens(self) -> dict[str, int]:
        """request id -> tokens of this step."""
        return {row.request_id: len(row.token_ids) for row in self.rows}

    @property
    def total(self) -> int:
        """Tokens of this step."""
        return sum([len(row.token_ids) for row in self.rows])

    @property
    def lines(self) -> int:
        """Rows on the device: a proposal has one of its own."""
        return sum([row.samples or 1 for row in self.rows])
