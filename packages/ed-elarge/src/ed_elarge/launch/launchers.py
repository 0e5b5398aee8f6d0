"""The table of launchers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ed_elarge.launch import kubernetes, local, ray_cluster, slurm, ssh
from ed_elarge.launch.host_process import HostProcess
from ed_elarge.launch.launched_run import LaunchedRun


class Launcher(NamedTuple):
    """Functions of a launcher.

    Attributes:
        render: Return the text that starts a job: a script, commands, or manifests.
        start: Start a job and return an exit code.
        connections: Return the connections of an elastic run; None if the launcher has none.
    """

    render: Callable[[LaunchedRun], str]
    start: Callable[[LaunchedRun], int]
    connections: Callable[[LaunchedRun], list[HostProcess]] | None = None


LAUNCHERS = {
    "kubernetes": Launcher(kubernetes.render, kubernetes.start),
    "local": Launcher(local.render, local.start, local.connections),
    "ray": Launcher(ray_cluster.render, ray_cluster.start),
    "slurm": Launcher(slurm.render, slurm.start),
    "ssh": Launcher(ssh.render, ssh.start, ssh.connections),
}
