"""Structured output on the host: masks of the tokens that each sequence's grammar allows next.

The masks of a step are computed together, in threads that release the GIL. The device receives one
bit per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError, EasyDeLError

from ed_esurge.core.plan import NewSequence, PlanRow, StepPlan
from ed_esurge.grammars.reasoning import BITS, ThoughtEnds, forbid
from ed_esurge.grammars.store import Grammar, Grammars
from ed_esurge.sampling import PoolingParams, SamplingParams, StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GuideError(EasyDeLError):
    """The grammar of one sequence allows no token. The request ends with an error."""


def words(vocab_size: int) -> int:
    """Return the number of 32-bit words of a mask with one bit per token."""
    return -(-vocab_size // BITS)


class Guide:
    """The grammar state of one sequence.

    Args:
        matcher: a matcher at the beginning of the grammar.
        ends: strings that end the reasoning; None: the output has no reasoning.
    """

    def __init__(self, new: NewSequence, matcher: LLMatcher, ends: ThoughtEnds | None) -> None:
        self.matcher, self.ends = matcher, ends
        self._prompt_len = self._taken = new.prompt_len
        self._proposed: list[int] = []
        self.thought: bytes | None = None if ends is None else b""
        """The last text of the reasoning; None after the grammar has begun."""
        self.error: GuideError | None = None
        self._take(list(new.token_ids[new.prompt_len :]))

    def grow(self, row: PlanRow) -> None:
        """Advance by the new tokens of a row."""
        # A proposal of the last row that precedes this row was accepted.
        self._take(self._proposed[: max(row.start - self._taken, 0)])
        self._take(list(row.token_ids[self._taken - row.start : row.known - row.start]))
        self._proposed = list(row.token_ids[row.known - row.start :])

    def thoughts(self, proposed: Sequence[int]) -> list[np.ndarray]:
        """Return the masks during reasoning, before each proposal and after the last one.

        The list ends where the grammar begins. It is empty after the grammar has begun.
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
        """Record an error of the matcher."""
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
        place: function that copies an array to the devices.
    """

    def __init__(
        self,
        grammars: Grammars | None,
        num_slots: int,
        vocab_size: int,
        place: Callable[[Any], Any] = jnp.asarray,
    ) -> None:
        self._grammars, self._executor = grammars, None
        self._at: list[Guide | None] = [None] * num_slots
        self._wanted: list[StructuredOutputs | None] = [None] * num_slots
        self.vocab_size = vocab_size
        self._words = words(vocab_size)
        self._place = place
        self._everything: dict[int, jax.Array] = {}  # by the number of rows

    def hold(self, params: SamplingParams | PoolingParams) -> Grammar | None:
        """Return the grammar of a request. The caller's reference keeps the grammar alive."""
        structured_outputs = _get_structured_outputs(params)
        return (
            None if structured_outputs is None else self._require_grammars().get(structured_outputs)
        )

    def start(self, new: NewSequence) -> None:
        """Assign a slot to a sequence."""
        structured_outputs = _get_structured_outputs(new.params)
        self._at[new.slot], self._wanted[new.slot] = None, structured_outputs
        if structured_outputs is not None:
            grammars = self._require_grammars()
            ends = (
                grammars.thought_ends(structured_outputs.after)
                if structured_outputs.after
                else None
            )
            self._at[new.slot] = Guide(new, grammars.get(structured_outputs).matcher(), ends)

    def grow(self, row: PlanRow) -> None:
        """Advance a sequence by the tokens of a row."""
        guide = self._at[row.slot]
        if guide is not None:
            guide.grow(row)

    def get_allowed_tokens(
        self, plan: StepPlan, places: Sequence[int], rows: int
    ) -> np.ndarray | jax.Array:
        """Return bits of the tokens that each row of a step may sample, [rows, words] int32.

        Nothing is sent to the device if every token is allowed.

        Args:
            places: for each row of the plan, the index of its first sampled row.
        """
        masks = self.masks(plan, places, rows)
        return self.everything(rows) if masks is None else masks

    def everything(self, rows: int) -> jax.Array:
        """Return a mask on the device that allows every token in `rows` rows."""
        if rows not in self._everything:
            self._everything[rows] = self._place(np.full((rows, self._words), -1, np.int32))
        return self._everything[rows]

    def masks(self, plan: StepPlan, places: Sequence[int], rows: int) -> np.ndarray | None:
        """Return the masks of `get_allowed_tokens`, or None if no row has a grammar."""
        guided = [
            (place, row, guide)
            for place, row in zip(places, plan.rows, strict=True)
            if row.samples and (guide := self._at[row.slot]) is not None
        ]
        if not guided:
            return None
        masks = np.full((rows, words(self._require_grammars().size)), -1, np.int32)
        single_matchers: list[tuple[Any, int]] = []
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
                single_matchers.append((guide.matcher, place + begins))
        self._fill(masks, single_matchers, ahead)
        for place, row, guide in guided:
            guide.check()
            forbid(masks[place : place + row.samples], self._require_grammars().text_ends)
        return np.ascontiguousarray(masks[:, : self._words])

    def failures(self, plan: StepPlan) -> Mapping[str, GuideError]:
        """Return the errors of the sequences whose grammars allow no token."""
        failures: dict[str, GuideError] = {}
        for row in plan.rows:
            guide, structured_outputs = self._at[row.slot], self._wanted[row.slot]
            if guide is not None and guide.error is not None and structured_outputs is not None:
                failures[row.request_id] = guide.error
                # The copies of a matcher share the lexer states and their limit.
                self._require_grammars().forget(structured_outputs)
        return failures

    def _fill(
        self,
        masks: np.ndarray,
        single_matchers: list[tuple[Any, int]],
        ahead: list[tuple[Any, int, list[int]]],
    ) -> None:
        """Compute the masks of matchers for the given rows and the rows of their proposals."""
        from llguidance import LLExecutor
        from llguidance.numpy import (
            fill_next_token_bitmask_par,
            fill_next_token_bitmask_par_with_draft_tokens,
        )

        if self._executor is None:
            self._executor = LLExecutor()
        if single_matchers:
            fill_next_token_bitmask_par(self._executor, single_matchers, masks)
        if ahead:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, ahead, masks)

    def _require_grammars(self) -> Grammars:
        if self._grammars is None:
            raise ConfigError("structured output needs a tokenizer: give one to eSurge")
        return self._grammars


def _get_structured_outputs(params: SamplingParams | PoolingParams) -> StructuredOutputs | None:
    return params.structured_outputs if isinstance(params, SamplingParams) else None
