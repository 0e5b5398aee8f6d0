"""This machine: several processes of a run, for machines without a cluster and for trials.

The processes use the interpreter of the launcher, whose environment may not be activated.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace

from ed_infra.errors import ConfigError

from ed_elarge.launch.host_process import HostProcess, free_port, run_all
from ed_elarge.launch.launched_run import LaunchedRun, jax_variables

_HOST = "127.0.0.1"


def processes(job: LaunchedRun) -> list[HostProcess]:
    """Return the processes of a run in the order of their numbers.

    Raises:
        ConfigError: The options are those of another launcher.
    """
    job = _check_local(job)
    coordinator = f"{_HOST}:{free_port(_HOST)}"
    return [
        HostProcess(str(number), ("bash", "-c", shell))
        for number in range(job.processes)
        for shell in [job.shell(job.points[0], jax_variables(coordinator, job.processes, number))]
    ]


def connections(job: LaunchedRun) -> list[HostProcess]:
    """Return the connections of an elastic run, one per process.

    Raises:
        ConfigError: The options are those of another launcher.
    """
    job = _check_local(job)
    return [HostProcess(_HOST, ("bash", "-c", shell)) for shell in job.member_shells(job.processes)]


def render(job: LaunchedRun) -> str:
    """Return the commands of all processes, one per line."""
    return "".join(f"{shlex.join(process.words)}\n" for process in processes(job))


def start(job: LaunchedRun) -> int:
    """Run all processes, print their lines with the number, and return an exit code.

    Raises:
        ConfigError: The options are those of another launcher.
    """
    return run_all(processes(job))


def _check_local(job: LaunchedRun) -> LaunchedRun:
    """Return the run with the interpreter of this process.

    Raises:
        ConfigError: The options are those of another launcher.
    """
    if job.options:
        raise ConfigError(f"--option {job.options[0][0]}: --on local has no options")
    if job.hosts > 1:
        raise ConfigError(
            f"--hosts {job.hosts}: --on local uses this machine; "
            "--processes-per-host sets the number of processes"
        )
    if len(job.points) > 1:
        raise ConfigError("--sweep needs a queue: use --on slurm, or start one run after another")
    # -P: modules in the folder of the run do not replace installed ones.
    return replace(job, program=(sys.executable, "-P", "-m", "ed_elarge"))
