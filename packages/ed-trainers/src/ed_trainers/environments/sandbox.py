"""`Sandbox`: runs a command of a model with limits of time, memory and output.

The command runs in a process group of its own, with an empty folder as working directory and
without the variables of this process. On Linux it has no network and no view of other processes if
the kernel permits new namespaces. A sandbox limits damage by mistakes of a model. It is no boundary
against an attacker: the command can read all files that this user can read.
"""

from __future__ import annotations

import functools
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_CONFINED = Path(__file__).with_name("confined.py")


@dataclass(frozen=True)
class SandboxResult:
    """The end of a command.

    Attributes:
        output: standard output and standard error, in the order of their arrival.
        exit_code: exit code; negative for a signal.
        stopped_by: the limit that ended the command, or None.
    """

    output: str
    exit_code: int
    stopped_by: Literal["time", "output"] | None = None


@dataclass(frozen=True)
class Sandbox:
    """Limits of commands.

    Attributes:
        seconds: maximum duration of a command.
        memory: maximum address space of each process of the command, in bytes.
        output: maximum size of the output and of each written file, in bytes.
        network: whether the command may use the network.
    """

    seconds: float = 5.0
    memory: int = 2**29
    output: int = 2**16
    network: bool = False

    def python(self, code: str, text: str = "") -> SandboxResult:
        """Run Python code with the standard library only.

        Args:
            code: the program.
            text: standard input.
        """
        return self.run([sys.executable, "-I", "-S", "-c", code], text)

    def run(self, command: Sequence[str], text: str = "") -> SandboxResult:
        """Run a command.

        Args:
            command: the program and its arguments.
            text: standard input.
        """
        limits = [str(self.memory), str(int(self.seconds) + 1), str(self.output)]
        words = [sys.executable, "-I", "-S", str(_CONFINED), *limits, str(int(self.network))]
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as input_file:
            input_file.write(text.encode())
            input_file.seek(0)
            process = subprocess.Popen(
                [*words, *command],
                stdin=input_file,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={"PATH": os.defpath, "HOME": folder, "LANG": "C.UTF-8"},
                start_new_session=True,
            )
            try:
                output, stopped_by = self._read(process)
            finally:
                with suppress(ProcessLookupError):  # also processes that the command left
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        code = process.returncode
        return SandboxResult(output.decode(errors="replace"), code, stopped_by)

    def _read(
        self, process: subprocess.Popen[bytes]
    ) -> tuple[bytes, Literal["time", "output"] | None]:
        """Return the output until the command ends or reaches a limit."""
        limit, output = time.monotonic() + self.seconds, bytearray()
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector, process.stdout as stream:
            selector.register(stream, selectors.EVENT_READ)
            while True:
                remaining_seconds = limit - time.monotonic()
                if remaining_seconds <= 0:
                    return bytes(output), "time"
                if not selector.select(remaining_seconds):
                    continue
                more = os.read(stream.fileno(), 2**16)
                output += more
                if len(output) > self.output:
                    return bytes(output[: self.output]), "output"
                if more:
                    continue
                try:  # the command may have closed its output before its end
                    process.wait(max(limit - time.monotonic(), 0.01))
                except subprocess.TimeoutExpired:
                    return bytes(output), "time"
                return bytes(output), None


@functools.cache
def blocks_network() -> bool:
    """Return whether the kernel lets a sandbox run without a network."""
    code = "import socket; print([name for _, name in socket.if_nameindex()])"
    return Sandbox(seconds=30.0).python(code).output.strip() == "['lo']"
