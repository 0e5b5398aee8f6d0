"""Audio files to samples: one channel, one rate, within a limit of seconds.

Legend: n samples or frames, c channels.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float

from ed_esurge.speech.errors import AudioError, AudioTooLongError
from ed_esurge.speech.resampling import resampled
from ed_esurge.speech.riff import BLOCK, WavFile

#: Rates in frames of a second, and channels, that are accepted.
RATES, MOST_CHANNELS = (1_000, 384_000), 32
#: Shortest recording in seconds.
SHORTEST = 0.1
#: Formats of libsndfile that are audio files of other programs, without those of raw numbers.
FORMATS = ("AIFF", "AU", "CAF", "FLAC", "MP3", "OGG", "RF64", "W64", "WAV", "WAVEX")
_ACCEPTED = "flac, mp3, ogg (Vorbis, Opus), wav, aiff, au and caf"


def decoded(data: bytes, rate: int, max_seconds: float) -> Float[np.ndarray, " n"]:
    """Return the samples of an audio file as float32 from -1 to 1, the mean of its channels.

    The file is decoded in blocks, so a small file that contains a very long recording needs no more
    memory than a recording of `max_seconds`.

    Args:
        data: the file.
        rate: samples of a second.
        max_seconds: limit of the length.

    Raises:
        AudioTooLongError: the recording is longer than `max_seconds`.
        AudioError: the file is not readable.
    """
    if not data:
        raise AudioError("the audio file is empty")
    wav = WavFile.read(data)
    if wav is None:
        found, blocks = _by_library(data)
    else:
        found, blocks = wav.rate, wav.blocks()
        _check(wav.rate, wav.channels)
    most = int(max_seconds * rate)
    parts, count = [], 0
    for part in resampled(_mono(blocks, int(max_seconds * found)), found, rate):
        parts.append(part)
        count += len(part)
    if count < SHORTEST * rate:
        raise AudioError(
            f"the recording has {count / rate:.3f} seconds; the minimum is {SHORTEST} seconds"
        )
    samples = np.concatenate(parts)[:most]
    return np.clip(samples, -1, 1, out=samples if samples.flags.writeable else None)


def _check(rate: int, channels: int) -> None:
    if not RATES[0] <= rate <= RATES[1]:
        raise AudioError(
            f"the audio file has a rate of {rate} Hz; rates from {RATES[0]} to {RATES[1]} Hz are "
            "supported"
        )
    if not 1 <= channels <= MOST_CHANNELS:
        raise AudioError(
            f"the audio file has {channels} channels; 1 to {MOST_CHANNELS} channels are supported"
        )


def _mono(
    blocks: Iterator[Float[np.ndarray, "n c"]], most: int
) -> Iterator[Float[np.ndarray, " n"]]:
    """Yield the mean of the channels.

    Raises:
        AudioTooLongError: there are more than `most` frames.
        AudioError: a sample is not finite.
    """
    count = 0
    for block in blocks:
        count += len(block)
        if count > most:
            raise AudioTooLongError("the recording is too long")
        mono = block[:, 0] if block.shape[1] == 1 else block.mean(axis=1, dtype=np.float32)
        if not np.isfinite(mono).all():
            raise AudioError("the audio file has samples that are not finite (NaN or infinite)")
        # Filters of the resampling would spread a huge value over its neighbours.
        yield np.clip(mono, -1, 1)


def _by_library(data: bytes) -> tuple[int, Iterator[Float[np.ndarray, "n c"]]]:
    """Return the rate and the frames of a file that `soundfile` reads."""
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise AudioError(
            "this server reads WAV files (PCM or float) only: send such a file, or install "
            f"ed-esurge[audio] on the server for {_ACCEPTED} ({error})"
        ) from None

    try:
        file = soundfile.SoundFile(io.BytesIO(data))
    except (soundfile.SoundFileError, TypeError, ValueError) as error:
        raise AudioError(
            f"the file is not an audio file that this server reads ({_ACCEPTED}): {error}"
        ) from None
    if file.format not in FORMATS:
        raise AudioError(f"audio files of the format {file.format} are not supported: {_ACCEPTED}")
    _check(file.samplerate, file.channels)

    def blocks() -> Iterator[Float[np.ndarray, "n c"]]:
        count, step = 0, max(BLOCK // file.channels, 1)
        with file:
            while True:
                try:
                    block = file.read(step, dtype="float32", always_2d=True)
                except soundfile.SoundFileError as error:
                    raise AudioError(f"the audio file is damaged: {error}") from None
                count += len(block)
                if len(block):
                    yield block
                if len(block) < step:
                    break
            if file.format == "FLAC" and count < file.frames < 2**62:
                raise AudioError(
                    f"the FLAC file is truncated: its header promises {file.frames} frames, and "
                    f"the file has {count}"
                )

    return file.samplerate, blocks()
