"""Static shapes of steps. Their number is small, so that all are compiled before serving."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

# A prefill of few sequences should not compute the logits of many rows.
FEW_SEQS = 8
TOKEN_RATIO = 4


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """Static sizes of a step, ordered by cost.

    Attributes:
        tokens: number of flat tokens T.
        seqs: number of rows n.
        pages: number of page table columns p. Attention uses the real lengths, so one size is
            sufficient.
        drafts: whether rows of one token each may belong to one sequence, and recurrent layers
            compute them one after another.
    """

    tokens: int
    seqs: int
    pages: int
    drafts: bool = False

    @property
    def decodes(self) -> bool:
        """Whether every row has at most one token."""
        return self.tokens == self.seqs


class Buckets:
    """All shapes of an engine.

    Decode shapes have equal numbers of tokens and sequences: 1, 4, 8, 16, …. Token counts of
    prefill shapes grow by a factor of four and exceed the number of sequences.

    Args:
        max_num_seqs, max_num_tokens: numbers of rows and tokens of the largest step.
        pages: maximum number of pages of a sequence.
        min_tokens: token count of the smallest prefill shape.
        seq_buckets: ascending numbers of sequences of the decode shapes; None: the default above.
        invariant: whether to use one shape for every step, with a separate row for each token.
        steps: maximum number of decode steps of one program.
        drafts: whether a recurrent model verifies drafts, which adds a shape for each decode shape.
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
        steps: int = 1,
        drafts: bool = False,
    ) -> None:
        self.invariant, self.steps = invariant, steps
        self.drafts: tuple[StepShape, ...] = ()
        if invariant:
            self.prefill_tokens = (max_num_tokens,)
            self.decode = self.prefill = (StepShape(max_num_tokens, max_num_tokens, pages),)
            return
        if seq_buckets is None:
            seq_buckets = [1, *geometric_lengths(4, max_num_seqs, 2)]
        seqs = sorted({min(s, max_num_seqs) for s in seq_buckets})
        largest = max(max_num_tokens, max_num_seqs + 1)
        self.prefill_tokens = tuple(geometric_lengths(min(max(min_tokens, 2), largest), largest, 4))
        self.decode = tuple(StepShape(s, s, pages) for s in seqs)
        if drafts:
            self.drafts = tuple(StepShape(s, s, pages, drafts=True) for s in seqs if s > 1)
        prefill = set()
        for tokens in self.prefill_tokens:
            most = max(s for s in (1, *seqs) if s < tokens)
            prefill.add(StepShape(tokens, most, pages))
            if most > FEW_SEQS * TOKEN_RATIO:
                prefill.add(StepShape(tokens, FEW_SEQS, pages))
        self.prefill = tuple(sorted(prefill))

    @property
    def max_rows(self) -> int:
        """Number of rows of the largest decode shape."""
        return self.decode[-1].seqs

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        """All shapes, ascending."""
        return tuple(sorted({*self.decode, *self.prefill, *self.drafts}))

    def without_drafts(self) -> Buckets:
        """Return the shapes of a model that verifies no drafts."""
        buckets = copy(self)
        buckets.drafts = ()
        return buckets

    def get_decode_shape(self, seqs: int) -> StepShape:
        """Return the decode shape with this number of rows."""
        return next(shape for shape in self.decode if shape.seqs == seqs)

    @property
    def generic(self) -> StepShape:
        """The cheapest shape with a row for every sequence that also fits prompts.

        Steps of all kinds fit this shape if their tokens do, so an engine can serve with this shape
        alone.
        """
        most = self.prefill[-1].seqs
        return next(shape for shape in self.prefill if shape.seqs == most)

    def pick_drafts(self, tokens: int, seqs: int, *, prefill: bool = False) -> StepShape:
        """Return the cheapest shape for sequences with several tokens each. With `drafts`, a draft
        shape if it has a row for each token.

        Args:
            tokens, seqs, prefill: see `pick`.
        """
        if not prefill and self.drafts and tokens <= self.drafts[-1].seqs:
            return next(shape for shape in self.drafts if shape.seqs >= tokens)
        return self.pick(tokens, seqs, prefill=prefill or bool(self.drafts))

    def pick(self, tokens: int, seqs: int, *, prefill: bool = False) -> StepShape:
        """Return the cheapest shape that fits a step.

        Args:
            tokens, seqs: sizes of the step; equal sizes select a decode shape.
            prefill: whether to select a prefill shape for any sizes.
        """
        shapes = self.prefill if prefill or tokens > seqs else self.decode
        for shape in shapes:
            if shape.tokens >= tokens and shape.seqs >= seqs:
                return shape
        raise ValueError(
            f"a step of {tokens} tokens of {seqs} sequences exceeds the largest shape {shapes[-1]}"
        )


def geometric_lengths(first: int, last: int, ratio: int) -> list[int]:
    """Return `first`, `first * ratio`, … below `last`, and `last`."""
    sizes = []
    size = first
    while size < last:
        sizes.append(size)
        size *= ratio
    return [*sizes, last]
