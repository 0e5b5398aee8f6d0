"""The table of launchers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ed_elarge.launch import kubernetes, ray_cluster, slurm, ssh
from ed_elarge.launch.launched_run import LaunchedRun


class Launcher(NamedTuple):
    """Functions of a launcher.

    Attributes:
        render: Return the text that starts a job: a script, commands, or manifests.
        start: Start a job and return an exit code.
    """

    render: Callable[[LaunchedRun], str]
    start: Callable[[LaunchedRun], int]


LAUNCHERS = {
    "kubernetes": Launcher(kubernetes.render, kubernetes.start),
    "ray": Launcher(ray_cluster.render, ray_cluster.start),
    "slurm": Launcher(slurm.render, slurm.start),
    "ssh": Launcher(ssh.render, ssh.start),
}
