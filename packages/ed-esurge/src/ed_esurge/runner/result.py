"""Results of a step, read from the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np

from ed_esurge.core.plan import StepPlan


class NotFinite(ArithmeticError):
    """Values of a request are NaN or infinite."""

    def __init__(self) -> None:
        super().__init__("the model's numbers are not finite (NaN or infinity)")


@dataclass(slots=True)
class TokenScores:
    """Log-probabilities at one position.

    Attributes:
        token: the sampled token or the prompt token.
        logprob, rank: log-probability of the token, and 1 + the number of more probable tokens.
        top: the most probable tokens, best first, with their log-probabilities.
    """

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


#: What `StepResult.parts` returns.
StepParts = tuple[list[int], dict[str, np.ndarray | None], dict[str, Exception]]


class StepResult:
    """The arrays of a step. Reading an array waits for the device. Pickling reads all arrays.

    Args:
        plan: the plan of the step.
        packed: `Sampled.pack()` of the rows, int32 [n, w]; None if another process ran the step.
        places: for each row of the plan, the index of its first sampled row in `packed`.
        scores: packed scores of the flat tokens, for prompt log-probabilities, or None.
        vectors: pooled vectors by slot, float32 [m, d], or None.
        states: vectors of the flat tokens of requests with the task `token_embed`, or None.
        failures: errors of single sequences by request id. Their tokens are invalid.
        experts: experts of the flat tokens, int16 [T, layers, k], or None.
        masks: bits of the tokens from which the rows were sampled, int32 [n, w], or None.
    """

    def __init__(
        self,
        plan: StepPlan,
        packed: jax.Array | None,
        places: Sequence[int],
        scores: jax.Array | None = None,
        vectors: jax.Array | None = None,
        failures: Mapping[str, Exception] | None = None,
        states: jax.Array | None = None,
        experts: jax.Array | None = None,
        masks: jax.Array | None = None,
    ) -> None:
        self.plan, self.places = plan, places
        self.failures = failures or {}
        self._arrays: dict[str, jax.Array | np.ndarray | None] = {
            "packed": packed,
            "scores": scores,
            "vectors": vectors,
            "states": states,
            "experts": experts,
            "masks": masks,
        }
        self._tokens: list[int] | None = None
        self._accepted: dict[str, list[int]] | None = None

    def __getstate__(self) -> dict[str, object]:
        arrays = {name: x if x is None else np.asarray(x) for name, x in self._arrays.items()}
        metadata = {"plan": self.plan, "places": list(self.places), "failures": dict(self.failures)}
        return {**metadata, "_arrays": arrays, "_tokens": self._tokens, "_accepted": None}

    def parts(self) -> StepParts:
        """Return everything but the plan, read from the device: places, arrays and failures."""
        arrays = {name: x if x is None else np.asarray(x) for name, x in self._arrays.items()}
        return list(self.places), arrays, dict(self.failures)

    @classmethod
    def from_parts(cls, plan: StepPlan, parts: StepParts) -> StepResult:
        """Return the result of a plan that another process ran."""
        places, arrays, failures = parts
        return cls(plan, places=places, failures=failures, **cast("dict[str, Any]", arrays))

    @property
    def ready(self) -> bool:
        """Whether the device has finished the step, so that reading does not wait."""
        arrays: list[Any] = [x for x in self._arrays.values() if isinstance(x, jax.Array)]
        return all(array.is_ready() for array in arrays)

    def wait(self) -> None:
        """Wait until the device has finished the step."""
        for array in self._arrays.values():
            if isinstance(array, jax.Array):
                array.block_until_ready()

    def tokens(self) -> dict[str, list[int]]:
        """Return request id -> accepted tokens, at least one, for the rows that sample. A token is
        -1 if its logits are not finite."""
        if self._accepted is None:
            self._accepted = self._read_tokens()
        return self._accepted

    def _read_tokens(self) -> dict[str, list[int]]:
        column, steps = self._column(), self.plan.steps
        if steps > 1:
            return {
                row.request_id: finite(column[place : place + steps])
                for row, place in zip(self.plan.rows, self.places, strict=True)
            }
        return {
            row.request_id: [column[place]]
            if row.samples == 1
            else row.get_accepted_tokens(column[place : place + row.samples])
            for row, place in zip(self.plan.rows, self.places, strict=True)
            if row.samples
        }

    def not_finite(self) -> list[str]:
        """Return the ids of the requests whose logits are not finite."""
        return [name for name, tokens in self.tokens().items() if tokens[0] < 0]

    def get_interrupted_ids(self) -> list[str]:
        """Return the ids of the requests with logits that are not finite in one of several steps,
        after the first step. `tokens` returns their tokens before that step."""
        steps = self.plan.steps
        if steps == 1:
            return []
        return [name for name, tokens in self.tokens().items() if len(tokens) < steps]

    def get_token_scores(self, index: int, many: int, count: int | None) -> list[TokenScores]:
        """Return the first tokens that row `index` of the plan sampled.

        Args:
            index: index of the row.
            many: number of tokens.
            count: number of alternatives; None returns no log-probabilities.
        """
        lines = range(self.places[index], self.places[index] + many)
        if count is None:
            column = self._column()
            return [TokenScores(column[line], 0.0, 0, []) for line in lines]
        packed = self._host("packed")
        return [_read(packed[line], count) for line in lines]

    def prompt(self, index: int, count: int) -> Sequence[TokenScores]:
        """Return the scores of the token after each position of row `index` of the plan.

        Args:
            index: index of the row.
            count: number of alternatives.

        Raises:
            NotFinite: a log-probability is NaN.
        """
        lines = self._host("scores")[self._flat(index)]
        if np.isnan(np.ascontiguousarray(lines[:, 1]).view(np.float32)).any():
            raise NotFinite
        if count:
            return [_read(line, count) for line in lines]
        columns = (lines[:, 0], np.ascontiguousarray(lines[:, 1]).view(np.float32), lines[:, 2])
        values = zip(*(column.tolist() for column in columns), strict=True)
        return [TokenScores(token, logprob, rank, []) for token, logprob, rank in values]

    def get_pooled_vector(self, index: int) -> np.ndarray:
        """Return the pooled vector of row `index` of the plan, which ends its prompt; float32 [d].

        Raises:
            NotFinite: an element is NaN or infinite.
        """
        vector = self._host("vectors")[self.plan.rows[index].slot].copy()
        if not np.isfinite(vector).all():
            raise NotFinite
        return vector

    def token_states(self, index: int) -> np.ndarray:
        """Return the vectors of the tokens of row `index` of the plan, float32 [n, d].

        Raises:
            NotFinite: an element is NaN or infinite.
        """
        vectors = self._host("states")[self._flat(index)].copy()
        if not np.isfinite(vectors).all():
            raise NotFinite
        return vectors

    def experts(self, index: int) -> np.ndarray | None:
        """Return the experts of the tokens of row `index` of the plan, int16 [n, layers, k]; None
        if the runner does not return experts."""
        if self._arrays["experts"] is None:
            return None
        return self._host("experts")[self._flat(index)].copy()

    def masks(self, index: int, many: int) -> list[np.ndarray] | None:
        """Return the tokens from which row `index` of the plan sampled its first tokens, in
        ascending order, int32; None if the runner does not return masks.

        Args:
            index: index of the row.
            many: number of sampled tokens.
        """
        if self._arrays["masks"] is None:
            return None
        first = self.places[index]
        lines = np.ascontiguousarray(self._host("masks")[first : first + many]).view(np.uint8)
        bits = np.unpackbits(lines, axis=1, bitorder="little")
        return [np.flatnonzero(line).astype(np.int32) for line in bits]

    def _flat(self, index: int) -> slice:
        """Return the places of the tokens of row `index` among the flat tokens of the step."""
        start = sum(len(row.token_ids) for row in self.plan.rows[:index])
        return slice(start, start + len(self.plan.rows[index].token_ids))

    def _column(self) -> list[int]:
        if self._tokens is None:
            column: list[int] = self._host("packed")[:, 0].tolist()
            self._tokens = column
        return self._tokens

    def _host(self, name: str) -> np.ndarray:
        array = self._arrays[name]
        assert array is not None, f"no row of the step wanted {name}"
        if not isinstance(array, np.ndarray):
            self._arrays[name] = array = np.asarray(array)
        return array


def finite(tokens: list[int]) -> list[int]:
    """Return the first token and the tokens after it, up to the first -1."""
    return tokens[: tokens.index(-1, 1)] if -1 in tokens[1:] else tokens


def _read(line: np.ndarray, count: int) -> TokenScores:
    """Unpack one row of `Sampled.pack`: token, logprob, rank, ids, logprobs."""
    most = (line.size - 3) // 2
    ids = line[3 : 3 + count].tolist()
    logprobs = line[3 + most : 3 + most + count].view(np.float32).tolist()
    return TokenScores(
        token=int(line[0]),
        logprob=float(line[1:2].view(np.float32)[0]),
        rank=int(line[2]),
        top=list(zip(ids, logprobs, strict=True)),
    )
