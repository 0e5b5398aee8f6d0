"""The program of a worker process, which `ed_data.tokens.processes` starts.

The program reads pickled messages from its standard input: `sys.path`, then a function, then items.
It replies to the function and to each item with `(True, result)` or `(False, error)`. In contrast
to `multiprocessing`, it does not run the user's main module again, and imports only the modules
that the function needs.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import struct
import sys
import threading
from typing import IO, Any

HEAD = struct.Struct("<Q")


def send(stream: IO[bytes], value: object) -> None:
    """Write a message.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: the value cannot be pickled, and nothing
        was
            written.
    """
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(HEAD.pack(len(data)))
    stream.write(data)
    stream.flush()


def receive_message(stream: IO[bytes]) -> Any:
    """Read a message.

    Raises:
        EOFError: the other process has ended.
    """
    return pickle.loads(_exactly(stream, HEAD.unpack(_exactly(stream, HEAD.size))[0]))


def _exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError("the other process has ended")
    return data


def _main() -> None:
    """Process messages until the parent process ends."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output that a function prints must not become a reply
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process stops the worker
    sys.path[:] = receive_message(requests)
    items: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        try:
            while True:
                items.put(_exactly(requests, HEAD.unpack(_exactly(requests, HEAD.size))[0]))
        except EOFError:
            os._exit(0)  # the parent has ended, so no process waits for a result

    threading.Thread(target=read, daemon=True).start()
    function = None
    reply: tuple[bool, object]
    while True:
        try:
            value = pickle.loads(items.get())
            if function is None:
                function, reply = value, (True, None)
            else:
                reply = True, function(value)
        except Exception as error:
            reply = False, error
        try:
            send(replies, reply)
        except Exception:  # the reply cannot be pickled
            send(replies, (False, RuntimeError(f"{type(reply[1]).__name__}: {reply[1]}")))


if __name__ == "__main__":
    _main()
