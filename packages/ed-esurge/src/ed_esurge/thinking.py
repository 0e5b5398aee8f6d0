"""The thoughts of a reply: their texts, and their limit, after which their end is forced."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ed_infra.options import Options, Whole


class ThinkingBudget(Options):
    """A limit of the tokens of the thoughts at the beginning of a reply."""

    tokens: Whole
    """Maximum number of tokens of the thoughts."""
    end_token_ids: tuple[Whole, ...]
    """Tokens that end the thoughts."""
    start_token_ids: tuple[Whole, ...] = ()
    """Tokens that begin the thoughts. Empty: the prompt has begun them."""


class ThoughtTexts(Options):
    """The texts around the thoughts of a reply. Stop strings do not apply within thoughts."""

    opens: tuple[str, ...]
    """Texts that begin thoughts."""
    closes: tuple[str, ...]
    """Texts that end thoughts."""
    inside: bool = False
    """Whether the reply begins with thoughts."""


class LimitedThoughts:
    """The thoughts of one reply, which grows token by token. The time per token is constant.

    Args:
        budget: the limit.
        tokens: the first tokens of the reply.
    """

    def __init__(self, budget: ThinkingBudget, tokens: Sequence[int] = ()) -> None:
        self._budget = budget
        self._begun, self._ended, self._count = not budget.start_token_ids, False, 0
        start, end = budget.start_token_ids, budget.end_token_ids
        self._last: deque[int] = deque(maxlen=max(len(start), len(end)))
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Append a token to the reply."""
        if self._ended:
            return
        self._last.append(token)
        if not self._begun:
            self._begun = self._ends_with(self._budget.start_token_ids)
            if self._begun:
                self._last.clear()
            return
        self._count += 1
        self._ended = self._ends_with(self._budget.end_token_ids)

    @property
    def forced(self) -> int | None:
        """The only token that may follow; None = any token."""
        if not self._begun or self._ended or self._count < self._budget.tokens:
            return None
        end = self._budget.end_token_ids
        # The model may have written the beginning of the end itself.
        num_written = next(
            size for size in range(len(end) - 1, -1, -1) if self._ends_with(end[:size])
        )
        return end[num_written]

    def _ends_with(self, tokens: tuple[int, ...]) -> bool:
        return tuple(self._last)[max(len(self._last) - len(tokens), 0) :] == tokens
