"""How much of a prompt a step takes where padding costs as much as tokens do.

Shapes are pairs `(tokens, sequences)`, cheapest first; the last holds every step.
"""

from __future__ import annotations

from collections.abc import Sequence

# A step reads all weights once: on a CPU, about the time of so many tokens beyond those that it is
# padded to.
STEP = 32


def first_part(shapes: Sequence[tuple[int, int]], used: int, seqs: int, count: int) -> int:
    """Tokens of a prompt that a step takes: all, or as many as fill a smaller shape, if that step
    and those for the rest cost less than one large step.

    Args:
        shapes: see above; what a step costs is `STEP` and the tokens of its shape.
        used: tokens of the other sequences in the step.
        seqs: sequences of the step with the prompt's; the others have a token in each later step.
        count: tokens of the prompt, at least one.

    Returns:
        1 … `count`.
    """
    whole = STEP + padded(shapes, used + count, seqs)[0]
    spent, first, rest = 0, 0, count
    while spent < whole:
        smaller = [size for size, most in shapes if used < size < used + rest and seqs <= most]
        if not smaller:
            break
        part = smaller[-1] - used
        first = first or part
        spent += STEP + smaller[-1]
        rest, used = rest - part, seqs - 1
        if spent + STEP + padded(shapes, used + rest, seqs)[0] < whole:
            return first
    return count


def padded(shapes: Sequence[tuple[int, int]], tokens: int, seqs: int) -> tuple[int, int]:
    """The cheapest shape that holds a step."""
    return next(shape for shape in shapes if shape[0] >= tokens and shape[1] >= seqs)


def room(shapes: Sequence[tuple[int, int]], tokens: int, seqs: int) -> int:
    """Sequences of one token that a step can take without a larger shape."""
    most = padded(shapes, tokens, seqs)
    return min(most[0] - tokens, most[1] - seqs)
