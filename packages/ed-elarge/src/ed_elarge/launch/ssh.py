"""ssh: the processes of a run on the hosts of a file. The first host coordinates."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from ed_infra.errors import ConfigError

from ed_elarge.launch.host_process import HostProcess, run_all
from ed_elarge.launch.launched_run import LaunchedRun, jax_variables

#: Port of the coordinator on the first host, unless the option `port` sets another.
_PORT = 8476
#: Options that this launcher reads; all others are options of ssh (`-o NAME=VALUE`).
_OWN = ("hosts-file", "port")
#: `[USER@]HOST`; neither part may be read as an option, or by the shell of a proxy command.
_DESTINATION = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_:\[][A-Za-z0-9_.:%\[\]-]*")


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
        if not _DESTINATION.fullmatch(host):
            raise ConfigError(f"{path}:{number}: {host!r} must be HOST or USER@HOST")
        hosts.append(host)
    if not hosts:
        raise ConfigError(f"{path} lists no hosts: write one HOST or USER@HOST per line")
    return hosts


def processes(job: LaunchedRun) -> list[HostProcess]:
    """Return the processes of a run in the order of their numbers.

    Raises:
        ConfigError: The options do not describe one run on listed hosts.
    """
    hosts, flags, port = _hosts(job)
    count = len(hosts) * job.processes
    coordinator = f"{hosts[0].rpartition('@')[2]}:{port}"
    host_processes = []
    for number in range(count):
        shell = job.shell(job.points[0], jax_variables(coordinator, count, number))
        host = hosts[number // job.processes]
        # With a terminal, the end of the connection stops the remote process, which saves.
        words = ("ssh", "-tt", "-o", "BatchMode=yes", *flags, host, shell)
        host_processes.append(HostProcess(host, words))
    return host_processes


def _hosts(job: LaunchedRun) -> tuple[list[str], list[str], str]:
    """Return the hosts, the options of ssh, and the port of the coordinator."""
    options = dict(job.options)
    if len(job.points) > 1:
        raise ConfigError("--sweep needs a queue: use --on slurm, or start one run after another")
    if "hosts-file" not in options:
        raise ConfigError("--on ssh needs the hosts: --option hosts-file=FILE, one host per line")
    listed = read_hosts(Path(options["hosts-file"]))
    if job.hosts > len(listed):
        raise ConfigError(f"--hosts {job.hosts} is more than the file lists ({len(listed)})")
    port = options.get("port", str(_PORT))
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--option port={port} must be a number from 1 to 65535")
    flags = [
        flag
        for name, value in job.options
        if name not in _OWN
        for flag in ("-o", f"{name}={value}" if value else name)
    ]
    return listed[: job.hosts or None], flags, port


def render(job: LaunchedRun) -> str:
    """Return the commands of all processes, one per line."""
    return "".join(f"{shlex.join(process.words)}\n" for process in processes(job))


def start(job: LaunchedRun) -> int:
    """Run all processes, print their lines with the host, and return an exit code.

    Raises:
        ConfigError: This machine has no `ssh`, or the options are invalid.
    """
    return run_all(processes(job))


def connections(job: LaunchedRun) -> list[HostProcess]:
    """Return the connections of an elastic run: one per process, without a terminal.

    Raises:
        ConfigError: The options do not describe one run on listed hosts.
    """
    hosts, flags, _ = _hosts(job)
    return [
        HostProcess(
            hosts[number // job.processes],
            ("ssh", "-T", "-o", "BatchMode=yes", *flags, hosts[number // job.processes], shell),
        )
        for number, shell in enumerate(job.member_shells(len(hosts) * job.processes))
    ]
