"""The command `launch`: a run file on several hosts. It does not import jax."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ed_elarge.command.runs import File, RunSettings, Verbose
from ed_elarge.exits import guarded


def launch(
    file: File,
    on: Annotated[
        str, typer.Option("--on", metavar="kubernetes|ray|slurm|ssh", help="The launcher.")
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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what the launcher starts, and exit.")
    ] = False,
    settings: RunSettings = None,
    verbose: Verbose = False,
) -> None:
    """Start FILE on several hosts. They must all see the folder in which this command runs."""

    def work() -> int:
        from ed_infra.errors import ConfigError

        from ed_elarge.config import nodes
        from ed_elarge.config.action_options import ServeOptions
        from ed_elarge.config.layers import with_settings
        from ed_elarge.config.normalize import normalize
        from ed_elarge.launch.launched_run import LaunchedRun, parse_options, parse_sweep
        from ed_elarge.launch.launchers import LAUNCHERS

        if on not in LAUNCHERS:
            raise ConfigError(f"--on {on!r} must be one of {', '.join(LAUNCHERS)}")
        fixed = tuple(settings or ())
        run = normalize(with_settings(nodes.read(file), fixed, nodes.parse), require_actions=True)
        if sweep and run.trainer is None:
            raise ConfigError("--sweep needs a section trainer: each run has its own folder")
        directory = run.trainer.save_directory if run.trainer is not None else ""
        points = parse_sweep(fixed, sweep or (), str(directory))
        for point in points if sweep else ():
            normalize(with_settings(nodes.read(file), point, nodes.parse), require_actions=True)
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
        )
        if dry_run:
            print(LAUNCHERS[on].render(job), end="")
            return 0
        return LAUNCHERS[on].start(job)

    raise typer.Exit(guarded(work, verbose=verbose))
