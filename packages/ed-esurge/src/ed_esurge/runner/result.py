"""What a step gave, read back from the device."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from ed_esurge.core.plan import StepPlan


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probabilities at one position.

    Attributes:
        token: the chosen (or given) token.
        logprob, rank: its log-probability, and 1 + the number of more probable tokens.
        top: the most probable tokens, best first, with their log-probabilities.
    """

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class StepResult:
    """Holds the arrays of a step; reading waits for the device.

    Args:
        plan: what was run.
        packed: `Sampled.pack()` of the sequence slots, int32 [n, w].
        scores: the same of the flat tokens, for prompt log-probabilities, or None.
    """

    def __init__(self, plan: StepPlan, packed: jax.Array, scores: jax.Array | None) -> None:
        self.plan = plan
        self._packed, self._scores = packed, scores
        self._host: np.ndarray | None = None
        self._host_scores: np.ndarray | None = None

    def _rows(self) -> np.ndarray:
        if self._host is None:
            self._host = np.asarray(self._packed)
        return self._host

    def tokens(self) -> dict[str, int]:
        """request id -> sampled token, for the rows that sample."""
        column = self._rows()[:, 0].tolist()
        rows = zip(self.plan.rows, column, strict=False)
        return {row.request_id: token for row, token in rows if row.samples}

    def sampled(self, index: int, count: int | None) -> TokenScores:
        """The token that row `index` of the plan sampled.

        Args:
            count: alternatives wanted; None wants no log-probabilities either.
        """
        line = self._rows()[index]
        return TokenScores(int(line[0]), 0.0, 0, []) if count is None else read(line, count)

    def prompt(self, index: int, count: int) -> list[TokenScores]:
        """The same for the tokens after each position that row `index` of the plan passed."""
        if self._host_scores is None:
            self._host_scores = np.asarray(self._scores)
        start = sum(row.count for row in self.plan.rows[:index])
        lines = self._host_scores[start : start + self.plan.rows[index].count]
        if count:
            return [read(line, count) for line in lines]
        columns = (lines[:, 0], np.ascontiguousarray(lines[:, 1]).view(np.float32), lines[:, 2])
        values = zip(*(column.tolist() for column in columns), strict=True)
        return [TokenScores(token, logprob, rank, []) for token, logprob, rank in values]


def read(line: np.ndarray, count: int) -> TokenScores:
    """Take one packed line apart (`Sampled.pack`: token, logprob, rank, ids, logprobs)."""
    most = (line.size - 3) // 2
    ids = line[3 : 3 + count].tolist()
    logprobs = line[3 + most : 3 + most + count].view(np.float32).tolist()
    return TokenScores(
        token=int(line[0]),
        logprob=float(line[1:2].view(np.float32)[0]),
        rank=int(line[2]),
        top=list(zip(ids, logprobs, strict=True)),
    )
