"""Recordings: files, bytes or samples to one channel of samples at a rate.

`soundfile` decodes WAV, FLAC, OGG (Vorbis, Opus), MP3 and other formats; `soxr` changes the rate.
`ed-esurge` decodes with equal steps, so training and serving compute equal features of a file.

Legend: n samples, c channels.
"""

from __future__ import annotations

import re
from types import ModuleType
from typing import IO, TYPE_CHECKING, NamedTuple

from ed_data.errors import DataError
from ed_data.media_access import FileTooLargeError, open_file
from ed_data.rows.example import RowAudio
from ed_data.schema import Audio

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from soundfile import _SoundFileInfo

#: Largest encoded recording, and most samples of all channels of a decoded recording.
MAX_BYTES, MAX_SAMPLES = 2**28, 2**28
#: Rates in samples of a second. A changed rate multiplies the samples.
RATES = 1_000, 384_000
#: Samples of all channels that are decoded at once. The last bits of MP3 files depend on the size
#: of the blocks; `ed-esurge` reads blocks of the same size.
BLOCK = 2**22
#: A header may claim more data than the file has. Programs that write to a pipe claim the maximum.
_CLAIM = re.compile(r"data\s*:\s*(\d+)\s*\(should be (\d+)\)")
_UNKNOWN_LENGTH = 0x7FFFF000


class RecordingHeader(NamedTuple):
    """The facts of a recording that are known without decoding.

    Attributes:
        frames: number of samples of each channel.
        rate: samples of a second.
        channels: number of channels.
    """

    frames: int
    rate: int
    channels: int

    @property
    def seconds(self) -> float:
        """The duration."""
        return self.frames / self.rate

    def samples_at(self, rate: int) -> int:
        """Return the number of samples after a change of the rate, as librosa counts them."""
        return -(-self.frames * rate // self.rate)


def header(audio: RowAudio) -> RecordingHeader:
    """Return the facts of a recording.

    Raises:
        DataError: the recording cannot be read, or is too large.
    """
    source, location = audio
    if isinstance(source, dict) and "array" in source:
        return _check_size(
            RecordingHeader(len(source["array"]), source["sampling_rate"], 1), location
        )
    decoder = _decoder()
    try:
        with _open_recording(source, location) as file:
            info: _SoundFileInfo = decoder.info(file)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise _unreadable(location, error) from error
    claim = _CLAIM.search(info.extra_info)
    if claim is not None and 0 < int(claim[1]) < _UNKNOWN_LENGTH:
        raise _unreadable(
            location, f"it has {claim[2]} bytes of data, but its header states {claim[1]}"
        )
    recording_header = RecordingHeader(info.frames, info.samplerate, info.channels)
    if recording_header.frames < 1:
        raise _unreadable(location, "it has no samples")
    return _check_size(recording_header, location)


def _check_size(recording_header: RecordingHeader, location: str) -> RecordingHeader:
    if not RATES[0] <= recording_header.rate <= RATES[1]:
        raise DataError(
            f"{location}: the recording has {recording_header.rate} samples of a second; the rate "
            "must be from "
            f"{RATES[0]} to {RATES[1]}: correct the row, or set on_error: skip"
        )
    if recording_header.frames * recording_header.channels > MAX_SAMPLES:
        raise DataError(
            f"{location}: the recording has {recording_header.frames} samples and "
            f"{recording_header.channels} channels; the "
            f"limit is {MAX_SAMPLES} samples of all channels: split it, or set on_error: skip"
        )
    return recording_header


def read_samples(audio: RowAudio, rate: int) -> NDArray[np.float32]:
    """Return the samples [n] of a recording: the mean of the channels, at a rate.

    The numbers are those of `librosa.load(path, sr=rate)`, except for the last bits of MP3 files
    with more than `BLOCK` samples.

    Args:
        audio: the recording.
        rate: samples of a second.

    Raises:
        DataError: the recording cannot be decoded, or contains infinite numbers.
    """
    import numpy as np  # not needed to check a run file

    facts = header(audio)
    source, location = audio
    if facts.samples_at(rate) > MAX_SAMPLES:
        raise DataError(
            f"{location}: the recording has {facts.seconds:g} seconds, which are "
            f"{facts.samples_at(rate)} samples at {rate} Hz; the limit is {MAX_SAMPLES}: split it, "
            "or set on_error: skip"
        )
    if isinstance(source, dict) and "array" in source:
        samples = source["array"].astype(np.float32, copy=False)
    else:
        try:
            with _open_recording(source, location) as file:
                decoded = _decode_samples(file, facts.frames)
        except (OSError, RuntimeError, TypeError, ValueError) as error:
            raise _unreadable(location, error) from error
        if len(decoded) != facts.frames:
            raise _unreadable(location, f"it ends after {len(decoded)} of {facts.frames} samples")
        samples = decoded[:, 0] if facts.channels == 1 else decoded.mean(axis=1)
    if not np.isfinite(samples).all():
        raise _unreadable(location, "it contains samples that are not finite")
    if facts.rate != rate:
        samples = _resampler().resample(samples, facts.rate, rate)
        count = facts.samples_at(rate)
        samples = np.pad(samples[:count], (0, max(count - len(samples), 0)))
    return np.ascontiguousarray(samples, np.float32)


def _decode_samples(file: IO[bytes], most: int) -> NDArray[np.float32]:
    """Return the samples [n, c] of a file; one block more than `most` if its header is wrong."""
    import numpy as np

    with _decoder().SoundFile(file) as opened:
        opened.seek(0)  # as `soundfile.read` does; this changes the last bits of MP3 files
        step = max(BLOCK // opened.channels, 1)
        blocks = [opened.read(step, dtype="float32", always_2d=True)]
        while len(blocks[-1]) == step and step * len(blocks) <= most:
            blocks.append(opened.read(step, dtype="float32", always_2d=True))
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)


def _open_recording(source: Audio, location: str) -> IO[bytes]:
    """Open an encoded recording."""
    try:
        return open_file(source["bytes"] if isinstance(source, dict) else source, MAX_BYTES)
    except FileTooLargeError as error:
        raise DataError(
            f"{location}: the recording {error}: split it, or set on_error: skip"
        ) from error


def _decoder() -> ModuleType:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: libsndfile is missing
        raise _not_installed("soundfile", error) from error
    return soundfile


def _resampler() -> ModuleType:
    try:
        import soxr
    except ImportError as error:
        raise _not_installed("soxr", error) from error
    return soxr


def _not_installed(name: str, error: Exception) -> DataError:
    return DataError(
        f"reading recordings requires the package {name}: install ed-data[audio] ({error})"
    )


def _unreadable(location: str, error: object) -> DataError:
    return DataError(
        f"{location}: the recording cannot be decoded: {error}; correct the row, or set on_error: "
        "skip"
    )
