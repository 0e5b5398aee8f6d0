"""The server's interface to the worker process that reads audio files.

A fault of the decoding library ends the child of one file, and not the server.

Legend: n samples.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float

from ed_esurge.children.messages import REFUSED
from ed_esurge.children.process import (
    ChildEndedError,
    ChildLimits,
    ChildMemoryError,
    JobGroup,
    WorkerProcess,
)
from ed_esurge.speech.decoder_worker import RATE, SAMPLES, TOO_LONG
from ed_esurge.speech.library_files import missing
from ed_esurge.speech.samples import RATES, AudioError, AudioTooLongError

_ENDED = (
    "the audio file could not be read within the limits of this server, or made the decoding "
    "library fail: convert the file to WAV"
)
# Processor time of a file: a constant, and a part of the longest accepted recording.
CPU_SECONDS, CPU_SHARE = 10.0, 0.05
#: Memory of a file in bytes, in addition to that of the worker process and the file itself.
MEMORY = 2**29
#: Elapsed time of a file in seconds, in addition to its processor time.
_WALL_SECONDS = 120.0


class DecoderProcess(WorkerProcess):
    """Reads audio files in children of a worker process, which starts with the first file.

    Args:
        cpu_seconds: processor time of a file, in addition to `CPU_SHARE` of the longest recording.
    """

    def __init__(self, cpu_seconds: float = CPU_SECONDS) -> None:
        super().__init__("ed_esurge.speech.decoder_worker")
        self._cpu_seconds = cpu_seconds

    def read(
        self, data: bytes, max_seconds: float, group: JobGroup | None = None
    ) -> tuple[int, Iterator[Float[np.ndarray, " n"]]]:
        """Return the rate of a recording, and its samples in blocks.

        Args:
            data: the file.
            max_seconds: limit of the length.
            group: the jobs that are cancelled together.

        Raises:
            AudioError: the file cannot be read, exceeds a limit, or crashes its process.
            AudioTooLongError: the recording is longer than `max_seconds`. The iterator raises both
                errors, too.
        """
        if importlib.util.find_spec("soundfile") is None:
            raise missing("the package soundfile is not installed")
        messages = self._decode(data, max_seconds, group)
        kind, content = next(messages, (b"", b""))
        rate = int(content) if kind == RATE and content.isdigit() else 0
        if not RATES[0] <= rate <= RATES[1]:
            raise AudioError(_ENDED)
        return rate, self._samples(messages, int(max_seconds * rate))

    def _samples(
        self, messages: Iterator[tuple[bytes, bytes]], most: int
    ) -> Iterator[Float[np.ndarray, " n"]]:
        count = 0
        for kind, content in messages:
            if kind != SAMPLES or len(content) % 4:
                raise AudioError(_ENDED)
            block = np.frombuffer(content, np.float32)
            count += len(block)
            if count > most:
                raise AudioTooLongError("the recording is too long")
            yield block

    def _decode(
        self, data: bytes, max_seconds: float, group: JobGroup | None
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yield the messages of the child of a file.

        Raises:
            AudioError: the child reports an error, or has ended.
        """
        cpu = self._cpu_seconds + CPU_SHARE * max_seconds
        limits = ChildLimits(cpu, MEMORY, _WALL_SECONDS + cpu)
        try:
            for kind, content in self.messages(data, {"seconds": max_seconds}, limits, group):
                if kind == TOO_LONG:
                    raise AudioTooLongError(content.decode("utf-8", "replace"))
                if kind == REFUSED:
                    raise AudioError(content.decode("utf-8", "replace"))
                yield kind, content
        except ChildMemoryError:
            raise AudioError(
                f"the audio file needs more than {MEMORY >> 20} MiB to be read"
            ) from None
        except ChildEndedError:
            raise AudioError(_ENDED) from None
