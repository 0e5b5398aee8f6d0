"""Structured output on the host: the tokens that the grammar of each running sequence allows next.

The masks of a step are computed together, in threads that do not hold the interpreter. The device
reads them as bits, one for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError, EasyDeLError

from ed_esurge.core.plan import NewSequence, PlanRow, StepPlan
from ed_esurge.grammars.store import Grammar, Grammars
from ed_esurge.grammars.thoughts import BITS, ThoughtEnds, forbid
from ed_esurge.sampling import PoolingParams, SamplingParams, StructuredOutputs


class GuideError(EasyDeLError):
    """The grammar of one sequence cannot go on; the request ends with an error."""


def words(vocab_size: int) -> int:
    """Numbers of 32 bits that hold a bit for each token."""
    return -(-vocab_size // BITS)


class Guide:
    """The grammar of one sequence, and how far its output has come.

    Args:
        matcher: at the beginning of the grammar.
        ends: the texts that end thoughts; None: the output begins with the answer.
    """

    def __init__(self, new: NewSequence, matcher: Any, ends: ThoughtEnds | None) -> None:
        self.matcher, self.ends = matcher, ends
        self._prompt_len = self._taken = new.prompt_len
        self._proposed: list[int] = []
        self.thought: bytes | None = None if ends is None else b""
        """The last text of the thoughts; None: the grammar has begun."""
        self.error: GuideError | None = None
        self._take(list(new.token_ids[new.prompt_len :]))

    def grow(self, row: PlanRow) -> None:
        """Take the new tokens of a row."""
        # A proposal of the last row that lies before this row was confirmed.
        self._take(self._proposed[: max(row.start - self._taken, 0)])
        self._take(list(row.token_ids[self._taken - row.start : row.known - row.start]))
        self._proposed = list(row.token_ids[row.known - row.start :])

    def thoughts(self, proposed: Sequence[int]) -> list[np.ndarray]:
        """Return the masks within thoughts, before each proposal and after the last one.

        The list ends where the grammar begins. It is empty if the grammar has begun.
        """
        masks: list[np.ndarray] = []
        tail = self.thought
        for token in (*proposed, None):
            if tail is None or self.ends is None:
                break
            masks.append(self.ends.mask(tail))
            if token is not None:
                tail = self.ends.advance(tail, token)
        return masks

    def check(self) -> None:
        """Note an error of the matcher."""
        if self.error is None and self.matcher.is_error():
            count = self._taken - self._prompt_len
            self.error = GuideError(
                f"after {count} tokens, the grammar of the structured output exceeds the limits of "
                "one step, or allows no token: simplify the grammar"
            )

    def _take(self, tokens: list[int]) -> None:
        self._taken += len(tokens)
        for token in tokens:
            if self.thought is not None and self.ends is not None:
                self.thought = self.ends.advance(self.thought, token)
            elif not self.matcher.is_stopped():
                self.matcher.consume_token(token)
        self.check()


class Guides:
    """The grammars of running sequences, by slot.

    Args:
        place: puts an array where the device's functions read it.
    """

    def __init__(
        self,
        grammars: Grammars | None,
        num_slots: int,
        vocab_size: int,
        place: Callable[[jax.Array], jax.Array] = lambda array: array,
    ) -> None:
        self._grammars, self._executor = grammars, None
        self._at: list[Guide | None] = [None] * num_slots
        self._wanted: list[StructuredOutputs | None] = [None] * num_slots
        self._words = words(vocab_size)
        self._place = place
        self._everything: dict[int, jax.Array] = {}  # by the number of rows

    def hold(self, params: SamplingParams | PoolingParams) -> Grammar | None:
        """Return the grammar of a request. The grammar is kept as long as the caller keeps it."""
        wanted = _wanted(params)
        return None if wanted is None else self._known().get(wanted)

    def start(self, new: NewSequence) -> None:
        """Let a sequence take its slot."""
        wanted = _wanted(new.params)
        self._at[new.slot], self._wanted[new.slot] = None, wanted
        if wanted is not None:
            known = self._known()
            ends = known.thought_ends(wanted.after) if wanted.after else None
            self._at[new.slot] = Guide(new, known.get(wanted).matcher(), ends)

    def grow(self, row: PlanRow) -> None:
        """Take a row's tokens."""
        guide = self._at[row.slot]
        if guide is not None:
            guide.grow(row)

    def allowed(self, plan: StepPlan, places: Sequence[int], rows: int) -> np.ndarray | jax.Array:
        """Return bits of the tokens that each row of a step may sample, [rows, words] int32.

        Where every token is allowed, nothing is sent to the device.

        Args:
            places: of each row of the plan, the row in which it samples first.
        """
        masks = self.masks(plan, places, rows)
        return self.everything(rows) if masks is None else masks

    def everything(self, rows: int) -> jax.Array:
        """All bits of so many rows, on the device."""
        if rows not in self._everything:
            ones = jnp.full((rows, self._words), -1, jnp.int32)
            self._everything[rows] = self._place(ones)
        return self._everything[rows]

    def masks(self, plan: StepPlan, places: Sequence[int], rows: int) -> np.ndarray | None:
        """As `allowed`; None where no row has a grammar."""
        guided = [
            (place, row, guide)
            for place, row in zip(places, plan.rows, strict=True)
            if row.samples and (guide := self._at[row.slot]) is not None
        ]
        if not guided:
            return None
        masks = np.full((rows, words(self._known().size)), -1, np.int32)
        alone: list[tuple[Any, int]] = []
        ahead: list[tuple[Any, int, list[int]]] = []
        for place, row, guide in guided:
            proposed = list(row.token_ids[row.known - row.start :])
            thoughts = guide.thoughts(proposed)
            for index, mask in enumerate(thoughts):
                masks[place + index] = mask
            begins = len(thoughts)
            if guide.error is not None or begins > len(proposed):
                continue
            if begins < len(proposed):
                ahead.append((guide.matcher, place + begins, proposed[begins:]))
            else:
                alone.append((guide.matcher, place + begins))
        self._fill(masks, alone, ahead)
        for place, row, guide in guided:
            guide.check()
            forbid(masks[place : place + row.samples], self._known().text_ends)
        return np.ascontiguousarray(masks[:, : self._words])

    def failures(self, plan: StepPlan) -> Mapping[str, GuideError]:
        """Return the sequences of a step whose grammars cannot go on."""
        failures: dict[str, GuideError] = {}
        for row in plan.rows:
            guide, wanted = self._at[row.slot], self._wanted[row.slot]
            if guide is not None and guide.error is not None and wanted is not None:
                failures[row.request_id] = guide.error
                # The copies of a matcher share the states that they may exceed.
                self._known().forget(wanted)
        return failures

    def _fill(
        self,
        masks: np.ndarray,
        alone: list[tuple[Any, int]],
        ahead: list[tuple[Any, int, list[int]]],
    ) -> None:
        """Let matchers write their masks, in the given rows and those of their proposals."""
        from llguidance import LLExecutor
        from llguidance.numpy import (
            fill_next_token_bitmask_par,
            fill_next_token_bitmask_par_with_draft_tokens,
        )

        if self._executor is None:
            self._executor = LLExecutor()
        if alone:
            fill_next_token_bitmask_par(self._executor, alone, masks)
        if ahead:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, ahead, masks)

    def _known(self) -> Grammars:
        if self._grammars is None:
            raise ConfigError("structured output needs a tokenizer: give one to eSurge")
        return self._grammars


def _wanted(params: SamplingParams | PoolingParams) -> StructuredOutputs | None:
    return params.structured_outputs if isinstance(params, SamplingParams) else None
