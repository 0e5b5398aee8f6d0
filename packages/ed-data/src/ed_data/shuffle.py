"""Permutations that are the same in every version of numpy and on every machine.

numpy keeps the raw stream of a bit generator fixed for ever, but not what `permutation` makes of
it (NEP 19), and a run that is resumed after an upgrade must see the same order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def permutation(size: int, *key: int, buffer: int | None = None) -> NDArray[np.int64]:
    """Return a permutation of `range(size)` that depends on the key alone.

    Args:
        size: number of items.
        key: non-negative integers: what the permutation is of.
        buffer: None, or the number of neighbouring items among which items change places; with 0
            or 1 nothing moves.
    """
    if buffer is not None and buffer <= 1:
        return np.arange(size)
    draws = np.random.PCG64(np.random.SeedSequence(key)).random_raw(size)
    if buffer is None or buffer >= size:
        return np.argsort(draws, kind="stable")
    return np.lexsort((draws, np.arange(size) // buffer))
