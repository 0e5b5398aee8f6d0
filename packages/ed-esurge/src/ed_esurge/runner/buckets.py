"""The few static shapes that steps are padded to, so that everything is compiled before serving."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# A prefill of few sequences does not pay for the logits of all of them.
FEW_SEQS = 8
TOKEN_RATIO = 4


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """Static sizes of a step, ordered by cost.

    Attributes:
        tokens: flat tokens, T.
        seqs: sequence slots, n.
        pages: page-table columns, p. Attention follows the real lengths, so there is one size.
    """

    tokens: int
    seqs: int
    pages: int


class Buckets:
    """All shapes of an engine: for decoding as many tokens as sequences, 1, 4, 8, 16, …; for
    prefill token counts in steps of four.

    Args:
        max_num_seqs, max_num_tokens: the largest step.
        pages: pages of the longest sequence.
        min_tokens: smallest shape made for prefill.
        seq_buckets: numbers of sequences for decoding, ascending, instead of those.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        pages: int,
        min_tokens: int = 16,
        seq_buckets: Sequence[int] | None = None,
    ) -> None:
        if seq_buckets is None:
            seq_buckets = sorted({1, *geometric(min(4, max_num_seqs), max_num_seqs, 2)})
        else:
            seq_buckets = [min(s, max_num_seqs) for s in seq_buckets]
        self.prefill_tokens = tuple(geometric(min(min_tokens, max_num_tokens), max_num_tokens, 4))
        shapes = {Shape(s, s, pages) for s in seq_buckets}
        for tokens in self.prefill_tokens:
            most = next((s for s in seq_buckets if s >= tokens), seq_buckets[-1])
            most = min(most, tokens)
            shapes.add(Shape(tokens, most, pages))
            if most > FEW_SEQS * TOKEN_RATIO:
                shapes.add(Shape(tokens, FEW_SEQS, pages))
        self.shapes = tuple(sorted(shapes))

    def pick(self, tokens: int, seqs: int, *, prefill: bool = False) -> Shape:
        """The cheapest shape that holds a step.

        Args:
            tokens, seqs: real sizes.
            prefill: take one with a token count out of `prefill_tokens`.
        """
        for shape in self.shapes:
            fits = shape.tokens >= tokens and shape.seqs >= seqs
            if fits and (not prefill or shape.tokens in self.prefill_tokens):
                return shape
        raise ValueError(
            f"a step of {tokens} tokens of {seqs} sequences exceeds the largest shape "
            f"{self.shapes[-1]}"
        )


def geometric(first: int, last: int, ratio: int) -> list[int]:
    """`first`, `first * ratio`, … and `last`, ascending."""
    sizes = []
    size = first
    while size < last:
        sizes.append(size)
        size *= ratio
    return [*sizes, last]
