"""Rules of a checkpoint for the tokens of a completion, and the tokens before it."""

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

    def get_banned_tokens(self, count: int) -> tuple[int, ...]:
        """Return the tokens that are not allowed after `count` generated tokens."""
        return self.suppress_tokens + (() if count else self.begin_suppress_tokens)

    def forces_end(self, count: int, max_tokens: int) -> bool:
        """Return whether the token after `count` generated tokens is the forced end."""
        return self.forced_eos_token_id is not None and count == max_tokens - 1


@dataclass(frozen=True)
class DecoderStart:
    """The tokens of a decoder before its completion, and the rules of the completion.

    Attributes:
        start: `decoder_start_token_id`.
        forced_bos: `forced_bos_token_id`, the token after `start`; None = no such token.
        rules: rules of the tokens; None = no rules.
        bad_words_ids: sequences of tokens that are never generated.
    """

    start: int
    forced_bos: int | None = None
    rules: TokenRules | None = None
    bad_words_ids: tuple[tuple[int, ...], ...] = ()

    def prefix(self, forced_bos: int | None) -> list[int]:
        """Return the tokens before a completion.

        Args:
            forced_bos: the token of a request that replaces `forced_bos`.
        """
        second = self.forced_bos if forced_bos is None else forced_bos
        return [self.start] if second is None else [self.start, second]
