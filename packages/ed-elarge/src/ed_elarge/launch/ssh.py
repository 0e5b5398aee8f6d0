"""ssh: the processes of a run on the hosts of a file. The first host coordinates."""

from __future__ import annotations

import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ed_infra.errors import ConfigError

from ed_elarge.launch.launched_run import LaunchedRun, jax_variables

#: Port of the coordinator on the first host, unless the option `port` sets another.
_PORT = 8476
#: Options that this launcher reads; all others are options of ssh (`-o NAME=VALUE`).
_OWN = ("hosts-file", "port")


@dataclass(frozen=True)
class RemoteProcess:
    """One process of a run: its host and the command of ssh."""

    host: str
    words: tuple[str, ...]


def read_hosts(path: Path) -> list[str]:
    """Return the hosts of a file: one `[USER@]HOST` per line; `#` starts a comment.

    Raises:
        ConfigError: The file is missing or empty, or a line is no host.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"the hosts file {path} cannot be read: {error.strerror}") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        host = line.partition("#")[0].strip()
        if not host:
            continue
        if len(host.split()) > 1 or host.startswith("-"):
            raise ConfigError(f"{path}:{number}: {host!r} must be HOST or USER@HOST")
        hosts.append(host)
    if not hosts:
        raise ConfigError(f"{path} lists no hosts: write one HOST or USER@HOST per line")
    return hosts


def processes(job: LaunchedRun) -> list[RemoteProcess]:
    """Return the processes of a run in the order of their numbers.

    Raises:
        ConfigError: The options do not describe one run on listed hosts.
    """
    options = dict(job.options)
    point, *others = job.points
    if others:
        raise ConfigError("--sweep needs a queue: use --on slurm, or start one run after another")
    if "hosts-file" not in options:
        raise ConfigError("--on ssh needs the hosts: --option hosts-file=FILE, one host per line")
    listed = read_hosts(Path(options["hosts-file"]))
    if job.hosts > len(listed):
        raise ConfigError(f"--hosts {job.hosts} is more than the file lists ({len(listed)})")
    hosts = listed[: job.hosts or None]
    port = options.get("port", str(_PORT))
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--option port={port} must be a number from 1 to 65535")
    flags = [
        flag
        for name, value in job.options
        if name not in _OWN
        for flag in ("-o", f"{name}={value}" if value else name)
    ]
    count = len(hosts) * job.processes
    coordinator = f"{hosts[0].rpartition('@')[2]}:{port}"
    made = []
    for number in range(count):
        shell = job.shell(point, jax_variables(coordinator, count, number))
        host = hosts[number // job.processes]
        # With a terminal, the end of the connection stops the remote process, which saves.
        words = ("ssh", "-tt", "-o", "BatchMode=yes", *flags, host, shell)
        made.append(RemoteProcess(host, words))
    return made


def render(job: LaunchedRun) -> str:
    """Return the commands of all processes, one per line."""
    return "".join(f"{shlex.join(process.words)}\n" for process in processes(job))


def start(job: LaunchedRun) -> int:
    """Run all processes, print their lines with the host, and return an exit code.

    If a process fails, the others are stopped, and the exit code is that of the process.

    Raises:
        ConfigError: This machine has no `ssh`, or the options are invalid.
    """
    planned = processes(job)
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
        raise ConfigError("there is no program ssh: install OpenSSH's client") from None
    return _wait(planned, running)


def _wait(planned: Sequence[RemoteProcess], running: Sequence[subprocess.Popen[str]]) -> int:
    """Return the first exit code that is not 0, or 0."""
    codes: list[int] = []
    changed = threading.Condition()

    def follow(process: RemoteProcess, child: subprocess.Popen[str], lines: IO[str]) -> None:
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
