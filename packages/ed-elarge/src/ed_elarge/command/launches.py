"""The command `launch`: a run file on several hosts. It does not import jax."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from ed_esurge.command.program import Result, show_result
from ed_infra.errors import ConfigError, unknown_name

from ed_elarge.command.runs import File, RunSettings

if TYPE_CHECKING:
    from ed_elarge.launch.launched_run import LaunchedRun


def launch(
    file: File,
    on: Annotated[
        str, typer.Option("--on", metavar="kubernetes|local|ray|slurm|ssh", help="The launcher.")
    ],
    hosts: Annotated[
        int,
        typer.Option(min=0, help="Hosts; 0: those of the file or of the TPU slice, or one."),
    ] = 0,
    processes: Annotated[
        int, typer.Option("--processes-per-host", min=1, help="Processes on each host.")
    ] = 1,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            metavar="KEY=VALUE,VALUE",
            help="One run per value: jobs of their own, or with ray one after another. Repeatable: "
            "all combinations.",
        ),
    ] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(
            "--setup", metavar="COMMAND", help="A shell command before the run. Repeatable."
        ),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            metavar="NAME=VALUE",
            help="An option of sbatch, ssh (also hosts-file, port), kubernetes or ray. Repeatable.",
        ),
    ] = None,
    elastic: Annotated[
        int,
        typer.Option(
            "--elastic",
            metavar="LEAST",
            min=0,
            help="Continue after the loss of processes while at least LEAST remain, and take them "
            "back when they return; with local and ssh. 0: not elastic.",
        ),
    ] = 0,
    rejoin: Annotated[
        float,
        typer.Option(
            min=0.0, help="With --elastic: seconds until a lost process is connected again."
        ),
    ] = 30.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what the launcher starts, and exit.")
    ] = False,
    settings: RunSettings = None,
) -> Result:
    """Start FILE on several hosts. They must all see the folder in which this command runs."""

    from ed_elarge.config import nodes
    from ed_elarge.config.action_options import ServeOptions
    from ed_elarge.config.layers import with_settings
    from ed_elarge.config.normalize import normalize
    from ed_elarge.launch.launched_run import LaunchedRun, parse_options, parse_sweep
    from ed_elarge.launch.launchers import LAUNCHERS

    if on not in LAUNCHERS:
        raise unknown_name("launcher of --on", on, LAUNCHERS)
    fixed = tuple(settings or ())
    run = normalize(
        with_settings(nodes.read_yaml(file), fixed, nodes.parse_yaml), require_actions=True
    )
    if sweep and run.trainer is None:
        raise ConfigError("--sweep needs a section trainer: each run has its own folder")
    directory = run.trainer.save_directory if run.trainer is not None else ""
    points = parse_sweep(fixed, sweep or (), str(directory))
    for point in points if sweep else ():
        normalize(
            with_settings(nodes.read_yaml(file), point, nodes.parse_yaml), require_actions=True
        )
    for warning in run.warning_texts():
        print(f"warning: {warning}", file=sys.stderr)
    server = None
    if [action.name for action in run.actions] == ["serve"]:
        served = run.actions[0].options
        assert isinstance(served, ServeOptions)
        server = served.host, served.port
    job = LaunchedRun(
        file=file,
        directory=Path(os.getcwd()),
        hosts=hosts,
        processes=processes,
        points=points,
        setup=tuple(setup or ()),
        options=parse_options(options or ()),
        server=server,
        least=elastic,
        rejoin=rejoin,
    )
    if elastic:
        return start_elastic(job, on, dry_run)
    if dry_run:
        return _show_plan(on, LAUNCHERS[on].render(job))
    code = LAUNCHERS[on].start(job)
    return Result({"launcher": on, "code": code}, code)


def _show_plan(on: str, text: str) -> Result:
    """Print what a launcher would start."""
    show_result(text.removesuffix("\n"))
    return Result({"launcher": on, "starts": text})


def start_elastic(job: LaunchedRun, on: str, dry_run: bool) -> Result:
    """Run until all processes have trained to the end, and return the result with an exit code.

    Args:
        job: The run.
        on: Name of the launcher.
        dry_run: Whether to print the commands of the members only.

    Raises:
        ConfigError: The launcher has no connections, the run does not train, or there are fewer
            members than the run needs.
    """
    import shlex

    from ed_elarge.launch import elastic
    from ed_elarge.launch.launchers import LAUNCHERS

    connections = LAUNCHERS[on].connections
    if connections is None:
        able = ", ".join(name for name, launcher in LAUNCHERS.items() if launcher.connections)
        raise ConfigError(f"--elastic is not possible with --on {on}: use {able}")
    if job.server is not None:
        raise ConfigError("--elastic continues a training run, and this file only serves")
    planned = connections(job)
    if len(planned) < job.least:
        raise ConfigError(
            f"--elastic {job.least} is more than the run has processes ({len(planned)}): lower it, "
            "or add hosts or --processes-per-host"
        )
    if dry_run:
        return _show_plan(on, "".join(f"{shlex.join(process.words)}\n" for process in planned))
    code = elastic.run_elastic(job, planned)
    return Result({"launcher": on, "code": code}, code)


def member(
    folder: Annotated[str, typer.Argument(help="LAUNCH/MEMBER: folder of the copies.")],
    file: File,
    settings: RunSettings = None,
) -> None:
    """Start processes for `elarge launch --elastic`, which writes to standard input."""
    from ed_elarge.command.runs import run_file
    from ed_elarge.launch.member import run_member

    words = [word for pair in settings or () for word in ("--set", pair)]

    def run(words: Sequence[str]) -> int:
        path, *changes = words
        return run_file(path, settings=changes[1::2])

    raise typer.Exit(run_member(folder, [file, *words], run))


def join(
    address: Annotated[str, typer.Argument(help="HOST:PORT of the trainer or server.")],
    role: Annotated[
        str, typer.Option("--as", help="What this host becomes: engine, environment or replica.")
    ] = "engine",
    name: Annotated[
        str | None,
        typer.Option(
            "--model-name",
            metavar="NAME",
            help="Model of the server; default: the model that lacks the most replicas.",
        ),
    ] = None,
) -> int:
    """Join an asynchronous run as an engine or as a process of environments, or a server.

    The variable ESURGE_CLUSTER_SECRET must have the same value as for the trainer or server.
    """
    from ed_elarge.asynchronous.joining import ENGINE, ENVIRONMENT, join_run
    from ed_elarge.building.replicas import REPLICA, join_as_replica

    if role == REPLICA:
        return join_as_replica(address, name)
    if role not in (ENGINE, ENVIRONMENT):
        raise unknown_name("role of --as", role, (ENGINE, ENVIRONMENT, REPLICA))
    return join_run(address, role)
