"""Near-duplicate documents, by MinHash over five consecutive tokens (Broder 1997)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ed_data.storage.store import StorePart

SHINGLE = 5
#: Minimum share of equal shingles of near-duplicates.
SIMILARITY = 0.8
_BANDS, _ROWS = 16, 4  # documents with equal rows in a band are compared
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def near_duplicates(part: StorePart, seed: int = 0) -> int:
    """Return the number of documents of an inform that are near-duplicates of an earlier document.

    The similarity is estimated from 64 hashes, so documents with a similarity close to `SIMILARITY`
    may be misclassified. Documents shorter than a shingle are compared as a whole.
    """
    signatures = _signatures(part, seed)
    is_duplicate = np.zeros(len(signatures), bool)
    for band in range(_BANDS):
        rows = signatures[:, band * _ROWS : (band + 1) * _ROWS]
        _, first, inverse = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        leader = first[inverse.reshape(-1)]
        later = np.flatnonzero(leader < np.arange(len(leader)))
        similar = (signatures[later] == signatures[leader[later]]).mean(axis=1)
        is_duplicate[later[similar >= SIMILARITY]] = True
    return int(is_duplicate.sum())


def _signatures(part: StorePart, seed: int) -> NDArray[np.uint64]:
    """Return [documents, hashes]: the minimum of each hash function over the shingles."""
    rng = np.random.Generator(np.random.PCG64(seed))
    factors = rng.integers(1, 2**63, _BANDS * _ROWS, np.uint64) * np.uint64(2) + np.uint64(1)
    result = np.empty((len(part.members), len(factors)), np.uint64)
    lengths = part.tokens.lengths(part.members, 0)
    for i, (document, length) in enumerate(zip(part.members, lengths.tolist(), strict=True)):
        ids, _ = part.tokens.gather(np.array([document]), np.zeros(1, np.int64), np.array([length]))
        wide = min(SHINGLE, max(length, 1))
        tokens = ids.astype(np.uint64)
        shingles = np.zeros(max(length - wide + 1, 1), np.uint64)
        for offset in range(min(wide, length)):
            shingles = (shingles ^ tokens[offset : length - wide + 1 + offset]) * _MULTIPLIER
            shingles ^= shingles >> np.uint64(29)
        mixed = np.unique(shingles)[:, None] * factors
        result[i] = (mixed ^ (mixed >> np.uint64(31))).min(axis=0)
    return result
