"""The static shapes that steps are padded to: few, so that all are compiled before serving."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# A prefill of few sequences should not pay for the logits of many.
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

    @property
    def decodes(self) -> bool:
        """No sequence has more than one token."""
        return self.tokens == self.seqs


class Buckets:
    """All shapes of an engine.

    Decoding has as many tokens as sequences, 1, 4, 8, 16, …: in such a shape no sequence has two
    tokens. Prefill has token counts that grow by a factor of four, always more than sequences.

    Args:
        max_num_seqs, max_num_tokens: the largest step.
        pages: pages of the longest sequence.
        min_tokens: smallest shape made for prefill.
        seq_buckets: numbers of sequences for decoding, ascending, instead of those.
        invariant: one shape for every step, in which each token has a row of its own.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        pages: int,
        min_tokens: int = 16,
        seq_buckets: Sequence[int] | None = None,
        invariant: bool = False,
    ) -> None:
        self.invariant = invariant
        if invariant:
            self.prefill_tokens = (max_num_tokens,)
            self.decode = self.prefill = (Shape(max_num_tokens, max_num_tokens, pages),)
            return
        if seq_buckets is None:
            seq_buckets = [1, *geometric(4, max_num_seqs, 2)]
        seqs = sorted({min(s, max_num_seqs) for s in seq_buckets})
        largest = max(max_num_tokens, max_num_seqs + 1)
        self.prefill_tokens = tuple(geometric(min(max(min_tokens, 2), largest), largest, 4))
        self.decode = tuple(Shape(s, s, pages) for s in seqs)
        prefill = set()
        for tokens in self.prefill_tokens:
            most = max(s for s in (1, *seqs) if s < tokens)
            prefill.add(Shape(tokens, most, pages))
            if most > FEW_SEQS * TOKEN_RATIO:
                prefill.add(Shape(tokens, FEW_SEQS, pages))
        self.prefill = tuple(sorted(prefill))

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """All of them, by size."""
        return tuple(sorted({*self.decode, *self.prefill}))

    def pick(self, tokens: int, seqs: int, *, prefill: bool = False) -> Shape:
        """The cheapest shape that holds a step.

        Args:
            tokens, seqs: real sizes; as many tokens as rows is a decode.
            prefill: take a shape for prefill, whatever the sizes.
        """
        shapes = self.prefill if prefill or tokens > seqs else self.decode
        for shape in shapes:
            if shape.tokens >= tokens and shape.seqs >= seqs:
                return shape
        raise ValueError(
            f"a step of {tokens} tokens of {seqs} sequences exceeds the largest shape {shapes[-1]}"
        )


def geometric(first: int, last: int, ratio: int) -> list[int]:
    """`first`, `first * ratio`, … below `last`, and `last`."""
    sizes = []
    size = first
    while size < last:
        sizes.append(size)
        size *= ratio
    return [*sizes, last]
