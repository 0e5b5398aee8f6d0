"""A program that limits itself and then runs a command; it imports the standard library only.

Arguments: bytes of memory, seconds of CPU time, bytes of a file, 1 for a network, the command.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

# Constants of Linux: clone flags and options of prctl.
_NEW_USER, _NEW_PROCESSES, _NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
_DIE_WITH_PARENT, _NO_NEW_PRIVILEGES = 1, 38


def _main() -> None:
    """Run the command of the arguments."""
    memory, seconds, size, network, *command = sys.argv[1:]
    separated = False
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        spaces = _NEW_PROCESSES | (0 if network == "1" else _NEW_NETWORK)
        # The administrator needs no user namespace, which containers often forbid.
        separated = libc.unshare(spaces) == 0 or libc.unshare(spaces | _NEW_USER) == 0
        libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    for kind, value in (
        (resource.RLIMIT_AS, int(memory)),
        (resource.RLIMIT_CPU, int(seconds)),
        (resource.RLIMIT_FSIZE, int(size)),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))
    if separated and (child := os.fork()):
        # The child is the first process of its namespace: with it, all its processes end.
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(128 - code if code < 0 else code)
    if sys.platform == "linux":
        libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error}", flush=True)
        os._exit(127)


if __name__ == "__main__":
    _main()
