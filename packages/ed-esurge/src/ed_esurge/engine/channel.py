"""Authenticated messages between the processes of one engine.

Each message has a code (HMAC-SHA256) over its content, its sender and its number. The number counts
the exchanges since the start and is the same in every process, so that no message can be forged,
changed, or replayed.

The key is derived from the environment variable `ESURGE_CLUSTER_SECRET`, which must be the same in
every process, and from a random value of this start. Without the variable, the processes agree on a
key over their network. Such a key offers protection only if attackers cannot read that network.
"""

from __future__ import annotations

import functools
import hmac
import os
from collections.abc import Callable

import jax
from ed_infra import distributed
from ed_infra.errors import EasyDeLError

#: Environment variable with the secret that the processes share.
SECRET = "ESURGE_CLUSTER_SECRET"
_SIZE = 32  # size of a code in bytes


class ForgedMessageError(EasyDeLError):
    """A message was not sent by another process of this engine, or is out of order."""


class Channel:
    """Exchanges messages. Every method is a collective operation.

    Args:
        secret: the shared secret; see the module docstring.
        process: the index of this process.
        broadcast: function that returns the bytes of process 0 in every process. The other
            processes pass None.
        gather: function that returns the bytes of every process, in process order.
    """

    def __init__(
        self,
        secret: bytes,
        process: int,
        broadcast: Callable[[bytes | None], bytes],
        gather: Callable[[bytes], list[bytes]],
    ) -> None:
        self._process, self._broadcast, self._gather = process, broadcast, gather
        fresh = broadcast(os.urandom(_SIZE) if process == 0 else None)
        self._key = hmac.digest(secret, fresh, "sha256")
        self._number = 0

    def broadcast(self, message: bytes | None = None) -> bytes:
        """Return the message of process 0 in every process.

        Args:
            message: the message in process 0; None in the other processes.

        Raises:
            ForgedMessageError: the message is not authentic.
        """
        if self._process == 0:
            assert message is not None, "process 0 has the message"
            self._broadcast(self._sign_message(message))
        else:
            message = self._verify_message(0, self._broadcast(None))
        self._number += 1
        return message

    def gather(self, message: bytes) -> list[bytes]:
        """Return the message of every process, in process order.

        Raises:
            ForgedMessageError: a message is not authentic.
        """
        sealed = self._gather(self._sign_message(message))
        messages = [self._verify_message(sender, data) for sender, data in enumerate(sealed)]
        self._number += 1
        return messages

    def _sign_message(self, message: bytes) -> bytes:
        return self._code(self._process, message) + message

    def _verify_message(self, sender: int, data: bytes) -> bytes:
        code, message = data[:_SIZE], data[_SIZE:]
        if not hmac.compare_digest(code, self._code(sender, message)):
            raise ForgedMessageError(
                f"message {self._number} of process {sender} is not authentic: give every process "
                f"the same {SECRET}, and keep others out of the network of the processes"
            )
        return message

    def _code(self, sender: int, message: bytes) -> bytes:
        code = hmac.new(self._key, digestmod="sha256")
        code.update(self._number.to_bytes(8, "big") + sender.to_bytes(8, "big"))
        code.update(message)
        return code.digest()


@functools.cache
def channel() -> Channel:
    """Return the channel among all processes of this run. The first call is a collective
    operation."""
    return Channel(
        os.environ.get(SECRET, "").encode(),
        jax.process_index(),
        distributed.broadcast_bytes,
        distributed.gather_bytes,
    )
