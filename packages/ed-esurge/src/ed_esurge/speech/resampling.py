"""Resampling of a recording that arrives in blocks.

Legend: n samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Float

#: Half length of the filter in periods of the lower rate, and its Kaiser window.
PERIODS, KAISER = 32, 8.0
#: Fewest samples of a step.
STEP = 2**18


def resampled(
    blocks: Iterable[Float[np.ndarray, " n"]], source: int, target: int
) -> Iterator[Float[np.ndarray, " n"]]:
    """Yield the samples at another rate. The result does not depend on the sizes of the blocks.

    The filter is a windowed sinc with zero phase (`scipy.signal.resample_poly`), which attenuates
    frequencies above half of the lower rate. Each step reads as many neighbours as the filter.

    Args:
        blocks: float32 samples.
        source, target: rates in samples of a second.
    """
    if source == target:
        yield from blocks
        return
    from scipy.signal import firwin, resample_poly

    common = math.gcd(source, target)
    up, down = target // common, source // common
    half = PERIODS * max(up, down)
    kaiser: Any = "kaiser", KAISER  # scipy's annotation lacks windows with an argument
    window = np.asarray(firwin(2 * half + 1, 1 / max(up, down), window=kaiser), np.float32)
    # The first sample of each step is a multiple of `down`, so the output has a whole index.
    margin = (half // up // down + 2) * down
    step = -(-STEP // down) * down
    kept, before = np.zeros(0, np.float32), 0  # `before`: samples whose output exists already

    def part(count: int | None) -> np.ndarray:
        """Return the output of `count` samples after them; None = all of them."""
        stop = None if count is None else before + count + margin
        whole = resample_poly(kept[:stop], up, down, window=window)
        begin = before // down * up
        return whole[begin : None if count is None else begin + count // down * up]

    for block in blocks:
        kept = np.concatenate([kept, block])
        while len(kept) - before >= step + margin:
            yield part(step)
            cut = max(before + step - margin, 0)
            kept, before = kept[cut:], before + step - cut
    if len(kept) > before:
        yield part(None)
