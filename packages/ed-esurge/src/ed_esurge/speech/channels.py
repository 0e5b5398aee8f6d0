"""Checks of a recording, and the mean of its channels.

Legend: n frames, c channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from jaxtyping import Float

from ed_esurge.speech.errors import AudioError, AudioTooLongError

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
