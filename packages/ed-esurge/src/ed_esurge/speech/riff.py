"""WAV files: the header, and the samples in blocks. Needs no library.

Legend: n frames, c channels.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from ed_esurge.speech.samples import AudioError

PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
#: A program that cannot seek writes a size near one of these limits for an unknown length.
UNKNOWN_SIZES = (range(0x7FFF0000, 0x80000000), range(0xFFFF0000, 0x100000000))
#: Values of a block.
_BLOCK = 2**20
_DTYPES = {
    (PCM, 8): "u1",
    (PCM, 16): "<i2",
    (PCM, 32): "<i4",
    (FLOAT, 32): "<f4",
    (FLOAT, 64): "<f8",
}


@dataclass(frozen=True)
class WavFile:
    """The samples of a WAV file.

    Attributes:
        rate: frames of a second.
        channels: number of channels c.
        encoding: `PCM` or `FLOAT`.
        bits: bits of a value: 8, 16, 24, 32 or 64.
        data: the encoded frames.
    """

    rate: int
    channels: int
    encoding: int
    bits: int
    data: memoryview

    @classmethod
    def read(cls, data: bytes) -> WavFile | None:
        """Read the header of a file.

        Returns:
            None for a file that is no WAV file, or has another encoding such as mu-law.

        Raises:
            AudioError: the header contradicts itself or the file.
        """
        if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
            return None
        form: bytes | None = None
        at = 12
        while at + 8 <= len(data):
            name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
            at += 8
            if name == b"fmt ":
                form = data[at : at + min(size, 40)]
            elif name == b"data":
                return cls._with(form, data, at, size)
            at += size + size % 2
        raise AudioError("the WAV file has no data chunk: the file is truncated or damaged")

    @classmethod
    def _with(cls, form: bytes | None, data: bytes, at: int, size: int) -> WavFile | None:
        if form is None or len(form) < 16:
            raise AudioError("the WAV file has no complete fmt chunk before its samples")
        encoding, channels, rate, _, frame, bits = struct.unpack("<HHIIHH", form[:16])
        if encoding == EXTENSIBLE and len(form) >= 26:
            encoding = int.from_bytes(form[24:26], "little")
        if (encoding, bits) not in _DTYPES and (encoding, bits) != (PCM, 24):
            return None
        if frame != channels * bits // 8:
            raise AudioError(
                f"the header of the WAV file has frames of {frame} bytes, but {channels} channels "
                f"of {bits} bits have {channels * bits // 8}"
            )
        remaining_bytes = len(data) - at
        if any(size in sizes for sizes in UNKNOWN_SIZES):
            size = remaining_bytes
        if size > remaining_bytes:
            raise AudioError(
                f"the WAV file is truncated: its header promises {size} bytes of samples, and the "
                f"file has {remaining_bytes}"
            )
        return cls(rate, channels, encoding, bits, memoryview(data)[at : at + size])

    def blocks(self) -> Iterator[Float[np.ndarray, "n c"]]:
        """Yield the frames as float32 from -1 to 1; an incomplete last frame is dropped."""
        width = self.bits // 8
        frame = width * self.channels
        step = max(_BLOCK // self.channels, 1) * frame
        end = len(self.data) // frame * frame
        for begin in range(0, end, step):
            values = self._values(self.data[begin : min(begin + step, end)])
            yield values.reshape(-1, self.channels)

    def _values(self, raw: memoryview) -> np.ndarray:
        if self.bits == 24:
            parts = np.frombuffer(raw, np.uint8).reshape(-1, 3)
            wide = np.zeros((len(parts), 4), np.uint8)
            wide[:, 1:] = parts
            return wide.view("<i4")[:, 0].astype(np.float32) / 2**31
        values = np.frombuffer(raw, _DTYPES[self.encoding, self.bits])
        if self.encoding == FLOAT:
            with np.errstate(over="ignore", invalid="ignore"):
                return values.astype(np.float32)
        if self.bits == 8:
            return (values.astype(np.float32) - 128) / 128
        return values.astype(np.float32) / 2 ** (self.bits - 1)
