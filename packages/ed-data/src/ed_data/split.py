"""The held-out split: by document, deterministic, and disjoint in content.

A document is held out by the hash of its content, so the split depends on neither the seed, the
tokenizer nor the order of files, and equal documents are always on the same side.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ed_data.errors import DataError


def held_out(hashes: Sequence[NDArray[np.uint64]], fraction: float) -> list[NDArray[np.bool_]]:
    """Choose the held-out documents of several informs.

    Of each inform the share `fraction` (rounded) with the smallest hashes is held out; at least
    one document in all.

    Args:
        hashes: per inform, the content hash of each document.
        fraction: share of documents, between 0 and 1.

    Returns:
        Per inform a mask: True where the document is held out.

    Raises:
        DataError: one side would be empty.
    """
    counts = [round(fraction * len(h)) for h in hashes]
    if not any(counts) and any(len(h) for h in hashes):
        counts[int(np.argmax([len(h) for h in hashes]))] = 1
    chosen = [np.sort(h)[:count] for h, count in zip(hashes, counts, strict=True)]
    # A copy of a held-out document is held out too, wherever it is.
    all_chosen = np.unique(np.concatenate(chosen)) if chosen else np.empty(0, np.uint64)
    masks = [np.isin(h, all_chosen) for h in hashes]
    total = sum(len(m) for m in masks)
    held = sum(int(m.sum()) for m in masks)
    if held == 0 or held == total:
        side = "evaluation" if held == 0 else "training"
        raise DataError(
            f"eval_fraction {fraction} leaves no document for {side}: there are {total} documents, "
            f"of which {held} would be held out (equal documents stay together); give more "
            "documents, another fraction, or eval_informs"
        )
    return masks
