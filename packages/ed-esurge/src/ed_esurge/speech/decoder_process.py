"""The server's interface to the worker process that reads audio files.

A fault of the decoding library ends the child of one file, and not the server.

Legend: n samples.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float

from ed_esurge.speech import decoder_worker as worker
from ed_esurge.speech.channels import RATES
from ed_esurge.speech.errors import AudioError, AudioTooLongError
from ed_esurge.speech.library_files import missing

ENDED = (
    "the audio file could not be read within the limits of this server, or made the decoding "
    "library fail: convert the file to WAV"
)
# Processor time of a file: a constant, and a part of the longest accepted recording.
CPU_SECONDS, CPU_SHARE = 10.0, 0.05


class DecoderProcess:
    """Reads audio files in children of a worker process, which starts with the first file.

    Args:
        cpu_seconds: processor time of a file, in addition to `CPU_SHARE` of the longest recording.
    """

    def __init__(self, cpu_seconds: float = CPU_SECONDS) -> None:
        self._cpu_seconds = cpu_seconds
        self._lock = threading.Lock()
        self._connection: _Connection | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the worker process after its start."""
        return None if self._connection is None else self._connection.process.pid

    def start(self) -> None:
        """Start the worker process if none runs, without waiting for its imports."""
        with self._lock:
            self._connected()

    def read(
        self, data: bytes, max_seconds: float
    ) -> tuple[int, Iterator[Float[np.ndarray, " n"]]]:
        """Return the rate of a recording, and its samples in blocks.

        Args:
            data: the file.
            max_seconds: limit of the length.

        Raises:
            AudioError: the file cannot be read, exceeds a limit, or crashes its process.
            AudioTooLongError: the recording is longer than `max_seconds`. The iterator raises both
                errors, too.
        """
        if importlib.util.find_spec("soundfile") is None:
            raise missing("the package soundfile is not installed")
        messages = self._messages(data, max_seconds)
        kind, content = next(messages)
        rate = int(content) if kind == worker.RATE and content.isdigit() else 0
        if not RATES[0] <= rate <= RATES[1]:
            raise AudioError(ENDED)
        return rate, self._samples(messages, int(max_seconds * rate))

    def _samples(
        self, messages: Iterator[tuple[bytes, bytes]], most: int
    ) -> Iterator[Float[np.ndarray, " n"]]:
        count = 0
        for kind, content in messages:
            if kind == worker.END:
                return
            if kind != worker.SAMPLES or len(content) % 4:
                raise AudioError(ENDED)
            block = np.frombuffer(content, np.float32)
            count += len(block)
            if count > most:
                raise AudioTooLongError("the recording is too long")
            yield block
        raise AudioError(ENDED)

    def _messages(self, data: bytes, max_seconds: float) -> Iterator[tuple[bytes, bytes]]:
        """Yield the messages of the child of a file.

        Raises:
            AudioError: the child reports an error, or has ended.
        """
        mine, other = socket.socketpair()
        with mine:
            mine.settimeout(worker.WALL_SECONDS)
            cpu = self._cpu_seconds + CPU_SHARE * max_seconds
            with other, self._lock:
                self._connected().send({"seconds": max_seconds, "cpu_seconds": cpu}, other)
            try:
                mine.sendall(data)
                mine.shutdown(socket.SHUT_WR)
                while True:
                    kind, length = worker.HEAD.unpack(_exactly(mine, worker.HEAD.size))
                    content = _exactly(mine, min(length, worker.PIECE))
                    if kind == worker.TOO_LONG:
                        raise AudioTooLongError(content.decode("utf-8", "replace"))
                    if kind == worker.ERROR:
                        raise AudioError(content.decode("utf-8", "replace"))
                    yield kind, content
                    if kind == worker.END:
                        return
            except (OSError, EOFError):  # the child has ended, or its time
                raise AudioError(ENDED) from None

    def _connected(self) -> _Connection:
        connection = self._connection
        if connection is None or connection.process.poll() is not None:
            if connection is not None:
                connection.close()
            connection = self._connection = _Connection()
            weakref.finalize(self, connection.close)
        return connection


class _Connection:
    """A worker process, and the socket that passes the sockets of files to the process."""

    def __init__(self) -> None:
        self._jobs, other = socket.socketpair()
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ed_esurge.speech.decoder_worker", str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
                    "OPENBLAS_NUM_THREADS": "1",
                },
            )

    def send(self, options: dict[str, float], file: socket.socket) -> None:
        """Pass the socket of a file. Raises AudioError: the process has just ended."""
        try:
            socket.send_fds(self._jobs, [json.dumps(options).encode()], [file.fileno()])
        except OSError:
            raise AudioError(ENDED) from None

    def close(self) -> None:
        """End the process."""
        self._jobs.close()
        self.process.wait()


def _exactly(source: socket.socket, count: int) -> bytes:
    """Return the next bytes of a socket. Raises EOFError: the socket has ended."""
    content = bytearray(count)
    view, got = memoryview(content), 0
    while got < count:
        step = source.recv_into(view[got:])
        if not step:
            raise EOFError
        got += step
    return bytes(content)
