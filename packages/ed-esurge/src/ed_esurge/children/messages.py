"""Messages between the server and a child: a kind, a length of four bytes, and the content."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable
from typing import Any

#: Kinds of messages that every task has: a refusal of the input, the lack of memory, the end. A
#: task may add kinds.
REFUSED, MEMORY, END = b"E", b"M", b"."
_HEAD = struct.Struct("<cI")
#: Size of the longest content of a message, in bytes.
PIECE = 2**20

SendAnswer = Callable[[bytes, bytes | memoryview], None]
"""Writes a message of a kind. A content longer than `PIECE` becomes several messages."""


class RefusedError(Exception):
    """A child refuses its input. The message describes the reason.

    Attributes:
        kind: kind of the refusal, which a task may choose.
    """

    def __init__(self, message: str, kind: bytes = REFUSED) -> None:
        super().__init__(message)
        self.kind = kind


def write_message(peer: socket.socket, kind: bytes, content: bytes | memoryview = b"") -> None:
    """Write a message."""
    view = memoryview(content).cast("B")
    for begin in range(0, max(len(view), 1), PIECE):
        piece = view[begin : begin + PIECE]
        peer.sendall(_HEAD.pack(kind, len(piece)))
        peer.sendall(piece)


def read_message(peer: socket.socket) -> tuple[bytes, bytes]:
    """Return kind and content of the next message.

    Raises:
        EOFError: the other side has ended, or sent an invalid message.
    """
    kind, length = _HEAD.unpack(read_exactly(peer, _HEAD.size))
    if length > PIECE:
        raise EOFError
    return kind, read_exactly(peer, length)


def write_options(peer: socket.socket, options: dict[str, Any]) -> None:
    """Write the options of a job."""
    content = json.dumps(options).encode()
    peer.sendall(_HEAD.pack(END, len(content)) + content)


def read_options(peer: socket.socket) -> dict[str, Any]:
    """Return the options of a job."""
    _, length = _HEAD.unpack(read_exactly(peer, _HEAD.size))
    return json.loads(read_exactly(peer, length))


def read_exactly(source: socket.socket, count: int) -> bytes:
    """Return the next bytes of a socket. Raises EOFError: the socket has ended."""
    content = bytearray(count)
    view, size = memoryview(content), 0
    while size < count:
        step = source.recv_into(view[size:])
        if not step:
            raise EOFError
        size += step
    return bytes(content)


def read_all(source: socket.socket) -> bytes:
    """Return the bytes of a socket until its end."""
    pieces = []
    while piece := source.recv(PIECE):
        pieces.append(piece)
    return b"".join(pieces)
