"""Resampling of a recording that arrives in blocks.

`ed-data` resamples whole recordings with the same library and quality, so training and serving
compute equal features of a file.

Legend: n samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from jaxtyping import Float

#: Quality of soxr, that of `librosa.load` and `ed_data.rows.recordings`.
QUALITY = "HQ"


def resample_blocks(
    blocks: Iterable[Float[np.ndarray, " n"]], source: int, target: int
) -> Iterator[Float[np.ndarray, " n"]]:
    """Yield the samples at another rate.

    The result equals `soxr.resample` of the whole recording, for every size of the blocks. Zeros
    complete the last sample, so that n samples become `ceil(n * target / source)`.

    Args:
        blocks: float32 samples.
        source, target: rates in samples of a second.
    """
    if source == target:
        yield from blocks
        return
    import soxr

    stream = soxr.ResampleStream(source, target, 1, dtype="float32", quality=QUALITY)
    read = num_written = 0
    for block in blocks:
        read += len(block)
        part = stream.resample_chunk(block)
        num_written += len(part)
        yield part
    last_block = stream.resample_chunk(np.zeros(0, np.float32), last=True)
    missing = max(-(-read * target // source) - num_written, 0)
    yield last_block[:missing]
    yield np.zeros(max(missing - len(last_block), 0), np.float32)
