"""Selection of prompt chunks that reduce padding.

Used where a padding token costs as much as a real token. Shapes are pairs `(tokens, sequences)`,
cheapest first. The last shape fits every step.
"""

from __future__ import annotations

from collections.abc import Sequence

# Fixed cost of a step in tokens: a step reads all weights once. On a CPU, this read costs about as
# much as the computation of this number of tokens.
STEP = 32


def first_part(shapes: Sequence[tuple[int, int]], used: int, seqs: int, count: int) -> int:
    """Return the number of prompt tokens to schedule in this step.

    The result is `count`, or fewer tokens that fill a smaller shape exactly. Fewer tokens are
    chosen if several small steps cost less than one large step. The cost of a step is `STEP` plus
    the tokens of its shape.

    Args:
        shapes: the shapes, see above.
        used: number of tokens of the other sequences in the step.
        seqs: number of sequences in the step, including the prompt's. Each of the others has one
            token in each later step.
        count: number of prompt tokens, at least one.

    Returns:
        a number in 1 … `count`.
    """
    full_cost = STEP + pick_shape(shapes, used + count, seqs)[0]
    spent, first, remaining_tokens = 0, 0, count
    while spent < full_cost:
        smaller = [
            size for size, most in shapes if used < size < used + remaining_tokens and seqs <= most
        ]
        if not smaller:
            break
        part = smaller[-1] - used
        first = first or part
        spent += STEP + smaller[-1]
        remaining_tokens, used = remaining_tokens - part, seqs - 1
        if spent + STEP + pick_shape(shapes, used + remaining_tokens, seqs)[0] < full_cost:
            return first
    return count


def pick_shape(shapes: Sequence[tuple[int, int]], tokens: int, seqs: int) -> tuple[int, int]:
    """Return the cheapest shape that fits a step."""
    return next(shape for shape in shapes if shape[0] >= tokens and shape[1] >= seqs)


def get_room(shapes: Sequence[tuple[int, int]], tokens: int, seqs: int) -> int:
    """Return the number of one-token sequences that fit into a step without a larger shape."""
    most = pick_shape(shapes, tokens, seqs)
    return min(most[0] - tokens, most[1] - seqs)
