"""The samples of a recording that arrives in blocks: checks, mean of the channels, resampling.

`ed-data` resamples whole recordings with the same library and quality, so training and serving
compute equal features of a file. The errors belong to the sender of a request.

Legend: n frames or samples, c channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from ed_infra.errors import EasyDeLError
from jaxtyping import Float


class AudioError(EasyDeLError):
    """A file is no audio file that this server reads."""


class AudioTooLongError(AudioError):
    """A recording exceeds the limit of seconds."""


class QueueFullError(EasyDeLError):
    """Too many transcriptions run or wait."""


#: Rates in frames of a second, and channels, that are accepted.
RATES, MOST_CHANNELS = (1_000, 384_000), 32
#: Largest sample. Lossy formats exceed 1 a little. Integers stored as floating-point numbers exceed
#: 1 far.
LOUDEST = 64.0


def check_form(rate: int, channels: int) -> None:
    """Check the header of a file. Raises AudioError: the rate or the channels are unsupported."""
    if not RATES[0] <= rate <= RATES[1]:
        raise AudioError(
            f"the audio file has a rate of {rate} Hz; rates from {RATES[0]} to {RATES[1]} Hz are "
            "supported"
        )
    if not 1 <= channels <= MOST_CHANNELS:
        raise AudioError(
            f"the audio file has {channels} channels; 1 to {MOST_CHANNELS} channels are supported"
        )


def mono(
    blocks: Iterable[Float[np.ndarray, "n c"]], most: int
) -> Iterator[Float[np.ndarray, " n"]]:
    """Yield the mean of the channels.

    Raises:
        AudioTooLongError: there are more than `most` frames.
        AudioError: a sample is not finite, or exceeds `LOUDEST`.
    """
    count = 0
    for block in blocks:
        count += len(block)
        if count > most:
            raise AudioTooLongError("the recording is too long")
        mean = block[:, 0] if block.shape[1] == 1 else block.mean(axis=1)
        if not np.isfinite(mean).all():
            raise AudioError("the audio file has samples that are not finite (NaN or infinite)")
        loudest = float(np.abs(mean).max(initial=0.0))
        if loudest > LOUDEST:
            raise AudioError(
                f"the audio file has a sample of {loudest:.4g}, but floating-point samples are "
                "from -1 to 1: scale the samples, or send integers"
            )
        yield np.ascontiguousarray(mean)


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
