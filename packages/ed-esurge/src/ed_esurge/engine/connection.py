"""Authenticated connections: of a server to its replicas, or of a trainer to its workers.

A connection is a TCP stream of frames: 8 bytes of length, then a message of
`ed_esurge.engine.channel`, whose content is encoded by `ed_esurge.engine.wire`. Both ends first
send a random value, and the key of each direction depends on both values and on the secret
`ESURGE_CLUSTER_SECRET`. Then both ends send a first message with their versions, so a program
without the secret is rejected before it can send anything large. The greeting has one deadline. No
message can create objects or run code.
"""

from __future__ import annotations

import hmac
import importlib.metadata
import os
import random
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Any

from ed_infra.errors import ConfigError, EasyDeLError

from ed_esurge.engine.channel import SECRET, Channel, ForgedMessageError
from ed_esurge.engine.wire import classes_digest, decode_message, encode_message

_NONCE = 32
#: Maximum bytes of a message before and after both ends are authenticated.
_SMALL, _LARGE = 2**12, 2**38
#: Seconds for the whole greeting, and of silence after which the kernel probes a connection.
GREETING_SECONDS, _PROBE = 10.0, 10
#: Attempts of `open`, and seconds between two of them. A listener under attack drops connections.
_ATTEMPTS, _PAUSE = 20, 0.5


class ConnectionLost(EasyDeLError):
    """The other end of a connection is gone."""


class VersionError(EasyDeLError):
    """The other end of a connection has another version of this program."""


class Connection:
    """One end of a connection. `send` may be called by several threads, `receive` by one.

    Args:
        stream: a connected socket.
        accepted: whether this end accepted the connection; the other end opened it.
        secret: the secret of both ends.
        limit: maximum bytes of a message of the other end.

    Attributes:
        head_limit: maximum bytes of a message of the other end without its arrays; None = `limit`.

    Raises:
        ForgedMessageError: the other end has another secret.
        VersionError: the other end has another version.
        ConnectionLost: the other end is gone, or exceeds the deadline of the greeting.
    """

    def __init__(
        self, stream: socket.socket, *, accepted: bool, secret: bytes, limit: int = _LARGE
    ):
        self._stream, self._lock, self._limit = stream, threading.Lock(), _SMALL
        self.head_limit: int | None = None
        self._deadline: float | None = time.monotonic() + GREETING_SECONDS
        stream.settimeout(GREETING_SECONDS)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", _PROBE),
            ("TCP_KEEPINTVL", _PROBE),
            ("TCP_KEEPCNT", 3),
        ):
            if hasattr(socket, name):
                stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        local_nonce = os.urandom(_NONCE)
        self._write(local_nonce)
        peer_nonce = self._read()
        nonces = local_nonce + peer_nonce if accepted else peer_nonce + local_nonce
        common = hmac.digest(secret, nonces, "sha256")
        keys = [hmac.digest(common, name, "sha256") for name in (b"to opener", b"to listener")]
        sends, receives = keys if accepted else reversed(keys)
        self._out = Channel(sends, 0, self._write_or_read, _no_gather)
        self._in = Channel(receives, 1, self._write_or_read, _no_gather)
        versions = _versions()
        self.send(versions)
        _compare_versions(versions, self.receive())
        self._limit, self._deadline = limit, None
        stream.settimeout(None)

    @classmethod
    def open(cls, address: str, secret: bytes) -> Connection:
        """Connect to a process that listens. A greeting that the process cuts off is repeated.

        Args:
            address: `HOST:PORT`.
            secret: the secret of both ends.

        Raises:
            ConnectionLost: no process listens at the address, or each greeting was cut off.
            ForgedMessageError: the process has another secret.
            VersionError: the process has another version.
        """
        for attempt in range(_ATTEMPTS):
            stream = cls._connect(address)
            try:
                return cls(stream, accepted=False, secret=secret)
            except ConnectionLost:
                stream.close()
                if attempt == _ATTEMPTS - 1:
                    raise
            except EasyDeLError:
                stream.close()
                raise
            time.sleep(random.uniform(0.1, _PAUSE))
        raise AssertionError("the last attempt returns or raises")

    @staticmethod
    def _connect(address: str) -> socket.socket:
        host, _, port = address.rpartition(":")
        try:
            return socket.create_connection((host, int(port)), GREETING_SECONDS)
        except (OSError, ValueError) as error:
            raise ConnectionLost(f"no process listens at {address}: {error}") from error

    def send(self, value: object) -> None:
        """Send a value that `ed_esurge.engine.wire` can encode.

        Raises:
            ConnectionLost: the other end is gone.
        """
        self.send_encoded(encode_message(value))

    def send_encoded(self, data: bytes) -> None:
        """Send a value that is already encoded."""
        with self._lock:
            self._out.broadcast(data)

    def receive(self, seconds: float | None = None) -> Any:
        """Wait for the next value.

        Args:
            seconds: seconds for the whole message; None = no limit.

        Raises:
            ConnectionLost: the other end is gone, or exceeds the seconds.
            ForgedMessageError: the message was not sent by the other end.
            WireError: the message cannot be read.
        """
        if seconds is not None:
            self._deadline = time.monotonic() + seconds
        data = self._in.broadcast()
        if seconds is not None:
            self._deadline = None
            self._stream.settimeout(None)
        return decode_message(data, self.head_limit)

    def limit_writes(self, seconds: float) -> None:
        """End the connection if the other end reads nothing for some seconds while this end
        writes."""
        span = struct.pack("ll", int(seconds), 0)
        self._stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, span)

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
                if self._deadline is not None:
                    remaining = self._deadline - time.monotonic()
                    if remaining <= 0:
                        raise TimeoutError("the message exceeds its deadline")
                    self._stream.settimeout(remaining)
                more = self._stream.recv(min(size - len(data), 2**20))
            except OSError as error:
                raise ConnectionLost(f"a connection ended: {error}") from error
            if not more:
                raise ConnectionLost("the other end closed the connection")
            data += more
        return data


def _versions() -> dict[str, str]:
    """Return what both ends of a connection must have in common."""
    return {
        "program": "easydel",
        "version": importlib.metadata.version("ed-esurge"),
        "messages": classes_digest(),
    }


def _compare_versions(local_versions: dict[str, str], there: object) -> None:
    """Raise VersionError if the other end has another version."""
    if there == local_versions:
        return
    version = there.get("version") if isinstance(there, dict) else None
    raise VersionError(
        f"the other process has version {str(version)[:64]!r} of ed-esurge and this process has "
        f"{local_versions['version']!r}, or their messages differ: install the same version on all "
        "hosts"
    )


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
