"""Authenticated connections: of a server to its replicas, or of a trainer to its workers.

A connection is a TCP stream of frames: 8 bytes of length, then a message of
`ed_esurge.engine.channel`, whose content is encoded by `ed_esurge.engine.wire`. Both ends first
send a random value, and the key of each direction depends on both values and on the secret
`ESURGE_CLUSTER_SECRET`. Then both ends send a first message, so a program without the secret is
rejected before it can send anything large. No message can create objects or run code.
"""

from __future__ import annotations

import hmac
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ed_infra.errors import ConfigError, EasyDeLError

from ed_esurge.engine.channel import SECRET, Channel, ForgedMessageError
from ed_esurge.engine.wire import decode, encode

_NONCE = 32
#: Maximum bytes of a message before and after both ends are authenticated.
_SMALL, _LARGE = 2**12, 2**38
#: Seconds for the first messages, and of silence after which the kernel probes a connection.
_GREETING, _PROBE = 30.0, 10


class ConnectionLost(EasyDeLError):
    """The other end of a connection is gone."""


class Connection:
    """One end of a connection. `send` may be called by several threads, `receive` by one.

    Args:
        stream: a connected socket.
        accepted: whether this end accepted the connection; the other end opened it.
        secret: the secret of both ends.

    Raises:
        ForgedMessageError: the other end has another secret.
        ConnectionLost: the other end is gone.
    """

    def __init__(self, stream: socket.socket, *, accepted: bool, secret: bytes):
        self._stream, self._lock, self._limit = stream, threading.Lock(), _SMALL
        stream.settimeout(_GREETING)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", _PROBE),
            ("TCP_KEEPINTVL", _PROBE),
            ("TCP_KEEPCNT", 3),
        ):
            if hasattr(socket, name):
                stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        own = os.urandom(_NONCE)
        self._write(own)
        other = self._read()
        both = own + other if accepted else other + own
        common = hmac.digest(secret, both, "sha256")
        keys = [hmac.digest(common, name, "sha256") for name in (b"to opener", b"to listener")]
        sends, receives = keys if accepted else reversed(keys)
        self._out = Channel(sends, 0, self._write_or_read, _no_gather)
        self._in = Channel(receives, 1, self._write_or_read, _no_gather)
        self.send("easydel")
        self.receive()
        self._limit = _LARGE
        stream.settimeout(None)

    @classmethod
    def open(cls, address: str, secret: bytes) -> Connection:
        """Connect to a process that listens.

        Args:
            address: `HOST:PORT`.
            secret: the secret of both ends.

        Raises:
            ConnectionLost: no process listens at the address.
        """
        host, _, port = address.rpartition(":")
        try:
            stream = socket.create_connection((host, int(port)), _GREETING)
        except (OSError, ValueError) as error:
            raise ConnectionLost(f"no process listens at {address}: {error}") from error
        return cls(stream, accepted=False, secret=secret)

    def send(self, value: object) -> None:
        """Send a value that `ed_esurge.engine.wire` can encode.

        Raises:
            ConnectionLost: the other end is gone.
        """
        self.send_encoded(encode(value))

    def send_encoded(self, data: bytes) -> None:
        """Send a value that is already encoded."""
        with self._lock:
            self._out.broadcast(data)

    def receive(self) -> Any:
        """Wait for the next value.

        Raises:
            ConnectionLost: the other end is gone.
            ForgedMessageError: the message was not sent by the other end.
        """
        return decode(self._in.broadcast())

    def wait(self) -> bool:
        """Wait until a message arrives, which stays unread; False: the other end is gone."""
        try:
            return bool(self._stream.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def close(self) -> None:
        """Close the connection; a waiting `receive` raises `ConnectionLost`."""
        with suppress(OSError):  # the other end closed it
            self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()

    def _write_or_read(self, data: bytes | None) -> bytes:
        if data is None:
            return self._read()
        self._write(data)
        return data

    def _write(self, data: bytes) -> None:
        try:
            head = len(data).to_bytes(8, "big")
            if len(data) <= _SMALL:  # one packet
                self._stream.sendall(head + data)
                return
            self._stream.sendall(head)
            self._stream.sendall(data)
        except OSError as error:
            raise ConnectionLost(f"a connection ended: {error}") from error

    def _read(self) -> bytes:
        size = int.from_bytes(self._exactly(8), "big")
        if size > self._limit:
            raise ForgedMessageError(
                f"a message of {size} bytes exceeds the limit of {self._limit}: another program "
                "uses the port"
            )
        return bytes(self._exactly(size))

    def _exactly(self, size: int) -> bytearray:
        data = bytearray()
        while len(data) < size:
            try:
                more = self._stream.recv(min(size - len(data), 2**20))
            except OSError as error:
                raise ConnectionLost(f"a connection ended: {error}") from error
            if not more:
                raise ConnectionLost("the other end closed the connection")
            data += more
        return data


class Listener:
    """Accepts streams at an address, and follows each in a thread of its own.

    Args:
        address: `HOST:PORT`; port 0 selects a free port.
        follow: called with each stream.

    Attributes:
        address: the address with its port.

    Raises:
        OSError: the address is not available.
        ValueError: the port is no number.
    """

    def __init__(self, address: str, follow: Callable[[socket.socket], None]) -> None:
        host, _, port = address.rpartition(":")
        self._follow, self._socket = follow, socket.create_server((host, int(port)))
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, name="listener", daemon=True).start()

    def close(self) -> None:
        """Accept no further streams."""
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self._socket.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._follow, args=(stream,), daemon=True).start()


def _no_gather(data: bytes) -> list[bytes]:
    raise AssertionError("a connection has two ends, which send in turn")


def shared_secret() -> bytes:
    """Return the secret of the environment, which all processes share.

    Raises:
        ConfigError: the environment variable is not set.
    """
    secret = os.environ.get(SECRET, "")
    if not secret:
        raise ConfigError(
            f"{SECRET} is not set: set it to the same random value in the first process and in "
            "every process that joins it"
        )
    return secret.encode()
