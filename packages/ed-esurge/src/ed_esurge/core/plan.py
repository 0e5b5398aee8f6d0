"""The plan of one step: the output of the scheduler, without arrays.

Any process that has the weights and all previous plans can run a plan. A plan contains only new
data. A sequence is described completely when it receives a slot (`NewSequence`). Its rows then
contain the tokens and the new pages of one step (`PlanRow`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ed_esurge.core.commands import TokenRules
from ed_esurge.sampling import PoolingParams, SamplingParams

#: Group -> `(saves, loads)`: host page -> device page, and device page -> host page.
Moves = Mapping[str, tuple[Mapping[int, int], Mapping[int, int]]]

#: (source, target) of each copy of a recurrent state: rows of the state arrays.
StateCopies = tuple[tuple[int, int], ...]

#: Token ids of a row whose input token the last step sampled, and the host has not read yet.
UNREAD = (-1,)


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that receives a slot, with all data that the runner needs.

    Attributes:
        request_id: id of the sequence's request.
        slot: index of the sequence, while the sequence runs, in the runner's tables, the sampler's
            state and the recurrent state.
        token_ids: all known tokens: the prompt, and after a preemption also the output.
        prompt_len: number of prompt tokens in `token_ids`.
        params: sampling or pooling options.
        seed: 32-bit seed of the sampling keys.
        end_token_ids: ids that may not be sampled before `min_tokens` tokens.
        bad_token_ids: token sequences that may not be generated.
        adapter: number of the LoRA adapter; 0 = none.
        rules: rules of the checkpoint for the tokens; None = no rules.
        max_tokens: maximum number of generated tokens.
        positions: rotary positions of the prompt along time, height and width, [3, prompt_len];
            None = the numbers of the tokens. Generated tokens continue after the largest position.
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
    rules: TokenRules | None = None
    max_tokens: int = 0
    positions: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class EncodedItem:
    """An item that the model's encoder computes before a step.

    Attributes:
        request_id: id of the sequence that needs the item.
        arrays: arrays of the item; see `EncoderInput`.
        rows: rows of the table of encoder outputs that receive the output.
    """

    request_id: str
    arrays: Mapping[str, np.ndarray]
    rows: Sequence[int]


class PlanRow(NamedTuple):
    """The tokens of one sequence in a step.

    Attributes:
        request_id: id of the sequence's request.
        slot: the slot of the sequence.
        start: position of the first computed token; equals the number of cached tokens.
        token_ids: the computed tokens: one for a decode, more for (a chunk of) a prompt. The last
            `samples - 1` tokens are proposals, which the sampled tokens accept or reject. See also
            `UNREAD`.
        pages: group -> page numbers to append to the page table of the sequence; only groups with
            new pages.
        samples: number of tokens to sample: one after the last known token and one after each
            proposal. 0 if the row ends before the last known token.
        scores: whether the step returns the log-probability of each next prompt token.
        pools: whether the hidden states are pooled. The row that ends the prompt returns the
            vector.
        features: for each token the row of the table of encoder outputs that replaces the token's
            embedding, or -1; () if no token has a row.
        states: slots of the recurrent state before and after the step; None = `slot` for both.
    """

    request_id: str
    slot: int
    start: int
    token_ids: Sequence[int]
    pages: Mapping[str, Sequence[int]]
    samples: int = 0
    scores: bool = False
    pools: bool = False
    features: Sequence[int] = ()
    states: tuple[int, int] | None = None

    @property
    def stop(self) -> int:
        """Position after the last computed token."""
        return self.start + len(self.token_ids)

    @property
    def known(self) -> int:
        """Position after the last token that is not a proposal."""
        return self.start + len(self.token_ids) - max(self.samples - 1, 0)

    @property
    def proposed(self) -> Sequence[int]:
        """The proposed tokens."""
        return self.token_ids[len(self.token_ids) - max(self.samples - 1, 0) :]

    def append_pages(self, new: Mapping[str, Sequence[int]]) -> PlanRow:
        """Return the row with more new pages."""
        pages = {group: (*self.pages.get(group, ()), *more) for group, more in new.items()}
        return self._replace(pages={**self.pages, **pages})

    def get_accepted_tokens(self, sampled: Sequence[int]) -> list[int]:
        """Return the accepted tokens: the first, and each token after a correct proposal.

        Args:
            sampled: `samples` sampled tokens.
        """
        right = 0
        for token, proposal, following in zip(sampled, self.proposed, sampled[1:], strict=False):
            if token != proposal or following < 0:
                break  # -1 is not a token: this position is sampled again with updated data
            right += 1
        return list(sampled[: right + 1])


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The rows of one step, and the requests that the scheduler preempted for them.

    Attributes:
        step: running number; a plan that is made ahead has the number of the previous step.
        rows: at most `max_num_seqs` rows, with at most the token budget in total.
        started: sequences whose first row since they received their slot is in this step.
        preempted: requests that were preempted while this step was planned.
        moves: pages to copy between device and host memory before the step; all saves come first.
        items: items to encode before the step.
        copies: group -> pages to copy on the device before the step: (source, target).
        ahead: whether the rows are `UNREAD`; see `ed_esurge.core.scheduler.plan_ahead`.
        restores: recurrent states to copy before the step, in this order.
        saves: recurrent states to copy after the step.
        steps: number of decode steps that one program computes. More than 1 only if every row has
            one token and samples; each row then samples `steps` tokens.
    """

    step: int
    rows: tuple[PlanRow, ...]
    started: tuple[NewSequence, ...] = ()
    preempted: tuple[str, ...] = ()
    moves: Moves = field(default_factory=dict)
    ahead: bool = False
    steps: int = 1
    items: tuple[EncodedItem, ...] = ()
    copies: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    restores: StateCopies = ()
    saves: StateCopies = ()

    @property
    def num_tokens(self) -> dict[str, int]:
        """Number of tokens of each request id in this step."""
        return {row.request_id: len(row.token_ids) for row in self.rows}

    @property
    def total(self) -> int:
        """Number of tokens in this step."""
        return sum([len(row.token_ids) for row in self.rows])

    @property
    def has_prompts(self) -> bool:
        """Whether a row has several tokens: a part of a prompt, or proposals."""
        return self.total > len(self.rows)

    @property
    def lines(self) -> int:
        """Number of rows on the device: each proposal has a separate row."""
        return sum([row.samples or 1 for row in self.rows])
