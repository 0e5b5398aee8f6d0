"""The beginning of an encoder-decoder's completions."""

from __future__ import annotations

from dataclasses import dataclass

from ed_esurge.core.token_rules import TokenRules


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
