"""The processes of a run that this machine starts, one connection each."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from ed_infra.errors import ConfigError


@dataclass(frozen=True)
class HostProcess:
    """One process of a run: its host, and the command that starts it from this machine."""

    host: str
    words: tuple[str, ...]


def free_port(address: str = "") -> int:
    """Return a port that no program uses on an address of this machine; empty: all addresses."""
    with socket.socket() as listener:
        listener.bind((address, 0))
        return int(listener.getsockname()[1])


def run_all(planned: Sequence[HostProcess]) -> int:
    """Run all processes, print their lines with the host, and return an exit code.

    If a process fails, the others are stopped, and the exit code is that of the process.

    Raises:
        ConfigError: This machine lacks the program of the connections.
    """
    running: list[subprocess.Popen[str]] = []
    try:
        for process in planned:
            running.append(
                subprocess.Popen(
                    process.words,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                )
            )
    except FileNotFoundError:
        raise ConfigError(f"there is no program {planned[0].words[0]}: install it") from None
    return _wait(planned, running)


def _wait(planned: Sequence[HostProcess], running: Sequence[subprocess.Popen[str]]) -> int:
    """Return the first exit code that is not 0, or 0."""
    codes: list[int] = []
    changed = threading.Condition()

    def follow(process: HostProcess, child: subprocess.Popen[str], lines: IO[str]) -> None:
        for line in lines:
            sys.stdout.write(f"[{process.host}] {line.rstrip()}\n")
            sys.stdout.flush()
        code = child.wait()
        with changed:
            codes.append(code)
            changed.notify()

    for process, child in zip(planned, running, strict=True):
        assert child.stdout is not None
        threading.Thread(target=follow, args=(process, child, child.stdout), daemon=True).start()
    try:
        with changed:
            while len(codes) < len(running) and not any(codes):
                changed.wait()
    finally:
        for child in running:
            if child.poll() is None:
                child.terminate()
        for child in running:
            child.wait()
    return next((code for code in codes if code), 0)
