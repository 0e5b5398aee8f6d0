"""Rules of a checkpoint for the first, the last, and all tokens of a completion."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Which tokens a completion may contain, with the names of Hugging Face's generation config.

    Attributes:
        suppress_tokens: tokens that are never generated.
        begin_suppress_tokens: tokens that are never generated first.
        forced_eos_token_id: the token that a completion of the maximum length ends with.
    """

    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    forced_eos_token_id: int | None = None

    def banned(self, count: int) -> tuple[int, ...]:
        """Return the tokens that are not allowed after `count` generated tokens."""
        return self.suppress_tokens + (() if count else self.begin_suppress_tokens)

    def forces_end(self, count: int, max_tokens: int) -> bool:
        """Return whether the token after `count` generated tokens is the forced end."""
        return self.forced_eos_token_id is not None and count == max_tokens - 1
