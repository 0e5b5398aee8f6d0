"""The worker process of one task. It forks a child for each job, and the child may crash or hang.

The process receives one socket for each job (`ed_esurge.children.process`), and forks. The child
reads the options and the data from the socket until its end, and writes messages
(`ed_esurge.children.messages`). The process is small and has one thread, so a fork lasts about a
millisecond. If the server closes its end of the socket, the process kills the child.

A task is a module that calls `run_worker` as the main module.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from ed_esurge.children.messages import (
    END,
    MEMORY,
    RefusedError,
    SendAnswer,
    read_all,
    read_options,
    write_message,
)


def limit_time(cpu_seconds: float, wall_seconds: float) -> None:
    """End this process after a processor time from now, or after an elapsed time from now."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, wall_seconds)


def limit_memory(count: int) -> None:
    """Limit the memory of this process to its present size and `count` bytes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform != "linux":  # other systems do not enforce this limit
        return
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = size + count
    if hard == resource.RLIM_INFINITY or hard > most:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


Work = Callable[[bytes, dict[str, Any], SendAnswer], None]
"""Does a job: data, options, and the function that writes messages. May raise `RefusedError`."""

#: Elapsed time in seconds in which the server sends the data of a job.
RECEIVE_SECONDS = 30.0
#: Elapsed time in seconds after which a child yields to the server, and to shorter jobs.
SHORT_JOB_SECONDS = 0.25
NICE = 10


class Worker:
    """Runs jobs until the server closes its end of `jobs`."""

    def __init__(self, work: Work, jobs: socket.socket) -> None:
        self._work, self._jobs = work, jobs
        self._peers: dict[int, tuple[socket.socket, int]] = {}  # descriptor -> socket, child
        self._young: dict[int, float] = {}  # child -> start, of those with the first priority
        self._poll = select.poll()

    def run(self) -> None:
        """Fork for each received socket. Kill the children whose sockets the server has closed."""
        ended, wake = os.pipe()
        for descriptor in (ended, wake):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._poll.register(self._jobs, select.POLLIN)
        self._poll.register(ended, select.POLLIN)
        while True:
            patience = SHORT_JOB_SECONDS * 1000 if self._young else None
            for descriptor, _ in self._poll.poll(patience):
                if descriptor == self._jobs.fileno():
                    _, sockets, _, _ = socket.recv_fds(self._jobs, 1, 1)
                    if not sockets:
                        self._kill_all()
                        return
                    self._start(socket.socket(fileno=sockets[0]))
                elif descriptor == ended:
                    with contextlib.suppress(BlockingIOError):
                        os.read(ended, 2**12)
                    self._collect()
                elif descriptor in self._peers:  # the server waits no longer
                    os.kill(self._peers[descriptor][1], signal.SIGKILL)
                    self._poll.unregister(descriptor)
            self._lower_priorities()

    def _lower_priorities(self) -> None:
        latest_start = time.monotonic() - SHORT_JOB_SECONDS
        for child in [child for child, start in self._young.items() if start <= latest_start]:
            del self._young[child]
            os.setpriority(os.PRIO_PROCESS, child, NICE)

    def _start(self, peer: socket.socket) -> None:
        try:
            child = os.fork()
        except OSError:  # too many processes: the server sees the end of the socket
            peer.close()
            return
        if not child:
            try:
                self._become_child(peer)
            finally:
                os._exit(0)
        self._peers[peer.fileno()] = peer, child
        self._young[child] = time.monotonic()
        self._poll.register(peer, 0)  # only the end of the connection

    def _become_child(self, peer: socket.socket) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._jobs.close()
        for sibling_socket, _ in self._peers.values():
            sibling_socket.close()
        run_job(self._work, peer)

    def _collect(self) -> None:
        """Close the sockets of the children that have ended."""
        places = {child: descriptor for descriptor, (_, child) in self._peers.items()}
        while True:
            try:
                child, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not child:
                return
            self._young.pop(child, None)
            descriptor = places.get(child)
            if descriptor is not None:
                with contextlib.suppress(KeyError):
                    self._poll.unregister(descriptor)
                self._peers.pop(descriptor)[0].close()

    def _kill_all(self) -> None:
        for _, child in self._peers.values():
            os.kill(child, signal.SIGKILL)


def run_job(work: Work, peer: socket.socket) -> None:
    """Read a job in a child, do its work within its limits, and write the messages."""
    limit_time(RECEIVE_SECONDS, RECEIVE_SECONDS)
    limits, options = read_options(peer), read_options(peer)
    data = read_all(peer)
    limit_time(limits["cpu_seconds"], limits["wall_seconds"])
    limit_memory(limits["memory"])

    def say(kind: bytes, content: bytes | memoryview = b"") -> None:
        write_message(peer, kind, content)

    try:
        work(data, options, say)
    except RefusedError as error:
        say(error.kind, str(error).encode("utf-8", "replace"))
    except MemoryError:
        say(MEMORY)
    else:
        say(END)


def run_worker(prepare: Callable[[], None], work: Work) -> None:
    """Run the worker process of a task.

    Args:
        prepare: imports what the children share.
        work: does one job in a child.
    """
    # Ignore interrupts of the terminal. The server handles them and closes its end of the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prepare()
    gc.collect()
    gc.freeze()  # a collection in a child would copy the pages of these objects
    Worker(work, socket.socket(fileno=int(sys.argv[1]))).run()
