"""Audio files that libsndfile reads. Runs in a child process; see `decoder_process`.

Legend: n frames, c channels.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Float

from ed_esurge.speech.samples import AudioError

#: Formats of libsndfile that are audio files of other programs, without those of raw numbers.
AUDIO_FORMATS = ("AIFF", "AU", "CAF", "FLAC", "MP3", "OGG", "RF64", "W64", "WAV", "WAVEX")
#: Values of a block. The last bits of decoded MP3 files depend on the blocks, so `ed-data` reads
#: blocks of the same size.
LIBRARY_BLOCK = 2**22
_ACCEPTED = "flac, mp3, ogg (Vorbis, Opus), wav, aiff, au and caf"


def missing(error: object) -> AudioError:
    """Return the error of a server without the library."""
    return AudioError(
        "this server reads WAV files (PCM or float) only: send such a file, or install "
        f"ed-esurge[audio] on the server for {_ACCEPTED} ({error})"
    )


class LibraryFile:
    """A file that `soundfile` reads.

    Args:
        data: the file.

    Attributes:
        rate: frames of a second.
        channels: number of channels c.

    Raises:
        AudioError: the library is missing, or does not read the file.
    """

    def __init__(self, data: bytes) -> None:
        try:
            import soundfile
        except (ImportError, OSError) as error:
            raise missing(error) from None
        self._failure: Any = soundfile.SoundFileError
        try:
            self._file = soundfile.SoundFile(io.BytesIO(data))
        except (soundfile.SoundFileError, TypeError, ValueError) as error:
            raise AudioError(
                f"the file is not an audio file that this server reads ({_ACCEPTED}): {error}"
            ) from None
        if self._file.format not in AUDIO_FORMATS:
            raise AudioError(
                f"audio files of the format {self._file.format} are not supported: {_ACCEPTED}"
            )
        self.rate, self.channels = self._file.samplerate, self._file.channels

    def blocks(self) -> Iterator[Float[np.ndarray, "n c"]]:
        """Yield the frames as float32.

        Raises:
            AudioError: the file is damaged or truncated.
        """
        count, step = 0, max(LIBRARY_BLOCK // self.channels, 1)
        with self._file as file:
            while True:
                try:
                    if not count:
                        file.seek(0)  # which changes the last bits of MP3 files
                    block = file.read(step, dtype="float32", always_2d=True)
                except self._failure as error:
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
