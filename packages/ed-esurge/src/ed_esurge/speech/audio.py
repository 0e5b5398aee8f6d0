"""Audio files to samples: one channel, one rate, within a limit of seconds.

Legend: n samples.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from ed_esurge.children.process import JobGroup
from ed_esurge.speech.decoder_process import DecoderProcess
from ed_esurge.speech.riff import WavFile
from ed_esurge.speech.samples import AudioError, check_form, mono, resample_blocks

#: Shortest recording in seconds.
SHORTEST = 0.1


def decode_audio(
    data: bytes,
    rate: int,
    max_seconds: float,
    decoder: DecoderProcess,
    group: JobGroup | None = None,
) -> Float[np.ndarray, " n"]:
    """Return the samples of an audio file as float32, the mean of its channels.

    The file is decoded in blocks, so a small file that contains a very long recording needs no more
    memory than a recording of `max_seconds`. A WAV file is read in this process, by Python code.

    Args:
        data: the file.
        rate: samples of a second.
        max_seconds: limit of the length.
        decoder: reads the files that are no WAV files.
        group: the jobs that are cancelled together.

    Raises:
        AudioTooLongError: the recording is longer than `max_seconds`.
        AudioError: the file is not readable.
    """
    if not data:
        raise AudioError("the audio file is empty")
    wav = WavFile.read(data)
    if wav is None:
        source_rate, blocks = decoder.read(data, max_seconds, group)
    else:
        check_form(wav.rate, wav.channels)
        source_rate, blocks = wav.rate, mono(wav.blocks(), int(max_seconds * wav.rate))
    parts = list(resample_blocks(blocks, source_rate, rate))
    count = sum(map(len, parts))
    if count < SHORTEST * rate:
        raise AudioError(
            f"the recording has {count / rate:.3f} seconds; the minimum is {SHORTEST} seconds"
        )
    return np.concatenate(parts)[: int(max_seconds * rate)]
