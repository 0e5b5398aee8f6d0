"""The worker process that reads each audio file in a separate child, which may crash or hang.

The process receives one socket for each file (`decoder_process`), and forks. The child reads the
file from the socket until its end, and writes messages: a kind of one byte, a length of four bytes,
and the content. The process is small and has one thread, so a fork takes a few milliseconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable

from ed_esurge.speech.channels import check_form, mono
from ed_esurge.speech.errors import AudioError, AudioTooLongError
from ed_esurge.speech.library_files import LibraryFile

# Kinds of messages: rate of the recording, float32 samples, an error, the end.
RATE, SAMPLES, ERROR, TOO_LONG, END = b"R", b"S", b"E", b"L", b"."
HEAD = struct.Struct("<cI")
#: Memory of a file in bytes, in addition to that of the worker process and the file itself.
MEMORY = 2**29
#: Elapsed time of a file in seconds, in addition to its processor time.
WALL_SECONDS = 120.0
#: Size of the pieces of a file, and of the longest content of a message, in bytes.
PIECE = 2**20


def run(jobs: socket.socket) -> None:
    """Fork for each received socket, until the server closes its end of `jobs`."""
    while True:
        options, sockets, _, _ = socket.recv_fds(jobs, 256, 1)
        if not sockets:
            return
        with socket.socket(fileno=sockets[0]) as peer:
            if not os.fork():
                try:
                    jobs.close()
                    read_file(peer, **json.loads(options))
                finally:
                    os._exit(0)


def read_file(peer: socket.socket, seconds: float, cpu_seconds: float) -> None:
    """Read one file in a child, and write its samples.

    Args:
        peer: the socket of the file.
        seconds: length of the longest accepted recording.
        cpu_seconds: limit of the processor time.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS + cpu_seconds)

    def say(kind: bytes, content: bytes | memoryview = b"") -> None:
        peer.sendall(HEAD.pack(kind, len(content)))
        peer.sendall(content)

    try:
        data = _received(peer)
        _limit_memory(len(data))
        _write_samples(data, seconds, say)
    except AudioTooLongError as error:
        say(TOO_LONG, str(error).encode())
    except AudioError as error:
        say(ERROR, str(error).encode())
    except MemoryError:
        say(ERROR, f"the audio file needs more than {MEMORY >> 20} MiB to be read".encode())
    else:
        say(END)


def _write_samples(
    data: bytes, seconds: float, say: Callable[[bytes, bytes | memoryview], None]
) -> None:
    file = LibraryFile(data)
    check_form(file.rate, file.channels)
    say(RATE, str(file.rate).encode())
    for block in mono(file.blocks(), int(seconds * file.rate)):
        content = block.data.cast("B")
        for begin in range(0, len(content), PIECE):
            say(SAMPLES, content[begin : begin + PIECE])


def _received(peer: socket.socket) -> bytes:
    pieces = []
    while piece := peer.recv(PIECE):
        pieces.append(piece)
    return b"".join(pieces)


def _limit_memory(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform != "linux":  # other systems do not enforce this limit
        return
    with open("/proc/self/statm") as file:
        own = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = own + size + MEMORY
    if hard == resource.RLIM_INFINITY or hard > most:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    # Ignore interrupts of the terminal. The server handles them and closes its end of the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system removes ended children
    with contextlib.suppress(ImportError, OSError):  # each file reports the missing library
        import soundfile  # noqa: F401  # before the forks, which share the library
    run(socket.socket(fileno=int(sys.argv[1])))
