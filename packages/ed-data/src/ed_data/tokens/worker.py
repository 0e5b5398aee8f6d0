"""The program of a worker process, which `ed_data.tokens.processes` starts.

It reads pickled messages from its standard input: the path of modules, then a function, then
items. It answers the function and each item with `(True, result)` or `(False, error)`. It imports
what the function needs and nothing else, and does not run the user's main module again, as
`multiprocessing` would.
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
        pickle.PicklingError, TypeError, AttributeError: the value cannot be pickled; nothing has
            been written.
    """
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(HEAD.pack(len(data)))
    stream.write(data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Read a message.

    Raises:
        EOFError: the other side is gone.
    """
    return pickle.loads(_exactly(stream, HEAD.unpack(_exactly(stream, HEAD.size))[0]))


def _exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError("the other side is gone")
    return data


def main() -> None:
    """Serve until the parent is gone."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a function prints is no reply
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when it is over
    sys.path[:] = receive(requests)
    items: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        try:
            while True:
                items.put(_exactly(requests, HEAD.unpack(_exactly(requests, HEAD.size))[0]))
        except EOFError:
            os._exit(0)  # in the middle of an item too: nobody waits for its result

    threading.Thread(target=read, daemon=True).start()
    function: Any = None
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
        except Exception:  # it cannot be pickled
            send(replies, (False, RuntimeError(f"{type(reply[1]).__name__}: {reply[1]}")))


if __name__ == "__main__":
    main()
