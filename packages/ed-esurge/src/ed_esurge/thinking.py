"""The limit of the thoughts of a reply: tokens that end the thoughts are forced."""

from __future__ import annotations

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

    def forced(self, output: Sequence[int]) -> int | None:
        """Return the only token that may follow an output; None = any token.

        The time is proportional to the length of the output.
        """
        begun = 0
        if self.start_token_ids:
            place = _find(output, self.start_token_ids)
            if place is None:
                return None
            begun = place + len(self.start_token_ids)
        if len(output) - begun < self.tokens:
            return None
        thoughts = output[begun:]
        end = self.end_token_ids
        if _find(thoughts, end) is not None:
            return None
        # The model may have written the beginning of the end itself.
        written = min(len(end) - 1, len(thoughts))
        while written and tuple(thoughts[-written:]) != end[:written]:
            written -= 1
        return end[written]


def _find(tokens: Sequence[int], part: Sequence[int]) -> int | None:
    """Return the first index of consecutive tokens; None = they do not occur."""
    first, count, wanted = part[0], len(part), list(part)
    for at in range(len(tokens) - count + 1):
        if tokens[at] == first and list(tokens[at : at + count]) == wanted:
            return at
    return None
