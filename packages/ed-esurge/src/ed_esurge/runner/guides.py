"""Structured output on the host: which tokens the grammar of each running sequence lets come next.

A grammar is compiled once and copied for each sequence. The masks of a step are made together, in
threads that do not hold the interpreter; the device gets them as bits, one for each token.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError

from ed_esurge.core.plan import NewSequence, PlanRow, StepPlan
from ed_esurge.sampling import SamplingParams, StructuredOutputs

BITS = 32
# Compiled grammars that are kept.
KEPT = 256
# A model may put one space where JSON allows any white space: it would go on for ever otherwise.
JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


def words(vocab_size: int) -> int:
    """Numbers of 32 bits that hold a bit for each token."""
    return -(-vocab_size // BITS)


class Grammars:
    """Compiles grammars for one tokenizer; any thread may.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        vocab_size: of the model.
        eos_token_ids: they may come where a grammar is at its end.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer, self._eos = tokenizer, sorted(eos_token_ids)
        self.size = max(vocab_size, len(tokenizer))
        """Tokens that masks are made for: some may be beyond the model's."""
        self._made: Any = None
        self._kept: OrderedDict[StructuredOutputs, Any] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def of(cls, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> Grammars | None:
        """Those of a tokenizer; None without one."""
        return None if tokenizer is None else cls(tokenizer, vocab_size, eos_token_ids)

    def matcher(self, wanted: StructuredOutputs) -> Any:
        """A new matcher at the beginning of a grammar.

        Raises:
            ConfigError: the grammar is not one, or too large; or there is no tokenizer for it.
        """
        with self._lock:
            known = self._kept.get(wanted)
            if known is None:
                known = self._kept[wanted] = self._compile(wanted)
                if len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(wanted)
            return known.deep_copy()

    def _compile(self, wanted: StructuredOutputs) -> Any:
        from llguidance import LLMatcher

        try:
            matcher = LLMatcher(self._vocabulary(), grammar_text(wanted))
        except ValueError as error:
            raise ConfigError(f"structured output: {error}") from None
        if matcher.is_error():
            said = str(matcher.get_error()).strip()
            raise ConfigError(f"structured output: {said[:500]}")
        return matcher

    def _vocabulary(self) -> Any:
        if self._made is None:
            import llguidance.hf

            if getattr(self._tokenizer, "backend_tokenizer", None) is None:
                raise ConfigError("structured output needs a fast Hugging Face tokenizer")
            self._made = llguidance.hf.from_tokenizer(
                self._tokenizer, n_vocab=self.size, eos_token=self._eos or None
            )
        return self._made


def grammar_text(wanted: StructuredOutputs) -> str:
    """What is wanted, as llguidance spells grammars.

    Raises:
        ValueError: it cannot be.
    """
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if wanted.json_schema is not None:
        return LLMatcher.grammar_from_json_schema(wanted.json_schema, defaults=JSON_STYLE)
    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in wanted.choice)
        return LLMatcher.grammar_from_lark(f"start: {texts}")
    grammar = wanted.grammar or ""
    if "::=" in grammar:
        try:
            grammar = gbnf_to_lark(grammar)
        except Exception as error:  # the converter's own
            raise ValueError(str(error)) from None
    return LLMatcher.grammar_from_lark(grammar)


class Guide:
    """The grammar of one sequence, and how far its output has come.

    Args:
        matcher: at the beginning of the grammar.
    """

    def __init__(self, new: NewSequence, matcher: Any, after: Sequence[int]) -> None:
        self.matcher, self._after = matcher, list(after)
        self._prompt_len, self._taken = new.prompt_len, new.prompt_len
        self._recent: list[int] = []
        self._proposed: list[int] = []
        self.free = bool(after)
        """The grammar has not begun."""
        self._take(list(new.token_ids[new.prompt_len :]))

    def grow(self, row: PlanRow) -> None:
        """Take the tokens of a row that are new."""
        # What was proposed in the last row and lies before this one was right.
        self._take(self._proposed[: max(row.start - self._taken, 0)])
        self._take(list(row.token_ids[self._taken - row.start : row.known - row.start]))
        self._proposed = list(row.token_ids[row.known - row.start :])

    def begins_within(self, proposed: Sequence[int]) -> int | None:
        """After how many proposals the grammar speaks; None if after none of them."""
        if not self.free:
            return 0
        recent = list(self._recent)
        for count, token in enumerate(proposed, 1):
            recent = [*recent, token][-len(self._after) :]
            if recent == self._after:
                return count
        return None

    def _take(self, tokens: list[int]) -> None:
        self._taken += len(tokens)
        for token in tokens:
            if self.free:
                self._recent = [*self._recent, token][-len(self._after) :]
                self.free = self._recent != self._after
            elif not self.matcher.is_stopped() and not self.matcher.consume_token(token):
                raise ValueError(f"token {token} is not in the grammar: {self.matcher.get_error()}")


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
        self._words = words(vocab_size)
        self._known = 0
        self._place = place
        self._everything: dict[int, jax.Array] = {}  # by the number of rows

    def start(self, new: NewSequence) -> None:
        """Let a sequence take its slot."""
        wanted = new.params.structured_outputs if isinstance(new.params, SamplingParams) else None
        self._known -= self._at[new.slot] is not None
        self._at[new.slot] = None
        if wanted is not None:
            if self._grammars is None:
                raise ConfigError("structured output needs a tokenizer: give one to eSurge")
            matcher = self._grammars.matcher(wanted)
            self._at[new.slot] = Guide(new, matcher, wanted.after)
            self._known += 1

    def grow(self, row: PlanRow) -> None:
        """Take a row's tokens."""
        guide = self._at[row.slot]
        if guide is not None:
            guide.grow(row)

    def allowed(self, plan: StepPlan, places: Sequence[int], rows: int) -> np.ndarray | jax.Array:
        """Bits of the tokens that each row of a step may sample, [rows, words] int32. Where it is
        all of them, nothing is sent to the device.

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
        """As `allowed`; None where no grammar speaks."""
        if not self._known:
            return None
        alone: list[tuple[Any, int]] = []
        ahead: list[tuple[Any, int, list[int]]] = []
        for place, row in zip(places, plan.rows, strict=True):
            guide = self._at[row.slot] if row.samples else None
            if guide is None:
                continue
            proposed = list(row.token_ids[row.known - row.start :])
            begins = guide.begins_within(proposed)
            if begins is not None and begins < len(proposed):
                ahead.append((guide.matcher, place + begins, proposed[begins:]))
            elif begins is not None:
                alone.append((guide.matcher, place + begins))
        if not (alone or ahead) or self._grammars is None:
            return None
        from llguidance import LLExecutor
        from llguidance.numpy import (
            fill_next_token_bitmask_par,
            fill_next_token_bitmask_par_with_draft_tokens,
        )

        if self._executor is None:
            self._executor = LLExecutor()
        masks = np.full((rows, words(self._grammars.size)), -1, np.int32)
        if alone:
            fill_next_token_bitmask_par(self._executor, alone, masks)
        if ahead:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, ahead, masks)
        return np.ascontiguousarray(masks[:, : self._words])
