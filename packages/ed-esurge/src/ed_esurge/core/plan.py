"""What one step computes: the scheduler's product, in plain numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One sequence's share of a step.

    Attributes:
        request_id: whose.
        start: position of the first token computed; equals the number of cached tokens.
        count: tokens computed: 1 for a decode, more for (a chunk of) a prefill.
        samples: the last token known is among them, so the step yields the next one.
    """

    request_id: str
    start: int
    count: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The rows of one step, and who lost its pages to make them possible.

    Attributes:
        step: running number.
        rows: at most `max_num_seqs`; their counts sum to at most the token budget.
        preempted: requests that went back to the queue while this step was planned.
    """

    step: int
    rows: tuple[PlanRow, ...]
    preempted: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> dict[str, int]:
        """request id -> tokens of this step."""
        return {row.request_id: row.count for row in self.rows}

    @property
    def total(self) -> int:
        """Tokens of this step."""
        return sum(row.count for row in self.rows)

    @property
    def is_decode(self) -> bool:
        """Every row computes one token."""
        return all(row.count == 1 for row in self.rows)
