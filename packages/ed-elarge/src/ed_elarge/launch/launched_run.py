"""A run file with the processes, settings and sweep of a launch; independent of the launcher."""

from __future__ import annotations

import itertools
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ed_infra.errors import ConfigError

#: Runs of a sweep: the largest array that SLURM accepts by default.
MAX_POINTS = 1000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class LaunchedRun:
    """What a launcher starts.

    Attributes:
        file: The run file, relative to `directory` or absolute.
        directory: Folder in which the run starts; every host must see it.
        hosts: Number of hosts; 0: all hosts that the launcher's options list, or one.
        processes: Processes on each host.
        points: Settings (`KEY=VALUE`) of each run; one run without a sweep.
        setup: Shell commands before the run, such as the activation of an environment.
        options: Options of the launcher itself, by name.
        server: Host and port of the server, if the run only serves.
        least: Smallest number of processes of an elastic run; 0: the run is not elastic.
        rejoin: Seconds until an elastic run connects to a lost host again.
        program: The words that start this program on the hosts.
    """

    file: str
    directory: Path
    hosts: int = 1
    processes: int = 1
    points: tuple[tuple[str, ...], ...] = ((),)
    setup: tuple[str, ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    server: tuple[str, int] | None = None
    least: int = 0
    rejoin: float = 30.0
    program: tuple[str, ...] = ("elarge",)

    @property
    def name(self) -> str:
        """Name of the job: the file without its suffix, and without characters that a header of a
        script or a pattern of file names could interpret."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(self.file).stem).strip("-.")[:100] or "run"

    def words(self, point: Sequence[str]) -> list[str]:
        """Return the command of a run as words."""
        file = f"./{self.file}" if self.file.startswith("-") else self.file
        return [*self.program, file, *(word for pair in point for word in ("--set", pair))]

    def command(self, point: Sequence[str]) -> str:
        """Return the command of a run, quoted for a shell."""
        return shlex.join(self.words(point))

    def shell(self, point: Sequence[str], variables: Mapping[str, str]) -> str:
        """Return the shell command of one process: its folder, setup, variables and run."""
        exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
        steps = [f"cd {shlex.quote(str(self.directory))}", *self.setup, *exports]
        return " && ".join([*steps, f"exec {self.command(point)}"])

    def member_shells(self, count: int) -> list[str]:
        """Return the shell commands of the members of an elastic run.

        The members find the copies of their state by a name that no other launch has.
        """
        launch = secrets.token_hex(8)
        change = f"cd {shlex.quote(str(self.directory))}"
        words = self.words(self.points[0])[len(self.program) :]
        return [
            " && ".join(
                [
                    change,
                    *self.setup,
                    f"exec {shlex.join([*self.program, 'member', f'{launch}/{number}', *words])}",
                ]
            )
            for number in range(count)
        ]


def jax_variables(coordinator: str, count: int, number: int | str) -> dict[str, str]:
    """Return the variables that connect a process with the others of its run.

    A run of one process has none: it must not wait for a coordinator.

    Args:
        coordinator: `host:port` of process 0.
        count: Number of processes.
        number: Number of this process, from 0, or the field that contains the number.
    """
    if count == 1:
        return {}
    return {
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(number),
    }


def parse_options(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the options of a launcher from `NAME=VALUE`, or `NAME` for a flag.

    Raises:
        ConfigError: An option has no name, or a line break.
    """
    pairs = []
    for text in texts:
        name, _, value = text.partition("=")
        if not _NAME.fullmatch(name) or "\n" in value:
            raise ConfigError(f"--option {text!r} must be NAME=VALUE, without line breaks")
        pairs.append((name, value))
    return tuple(pairs)


def parse_sweep(
    settings: Sequence[str], sweep: Sequence[str], save_directory: str
) -> tuple[tuple[str, ...], ...]:
    """Return the settings of every run of a sweep.

    Args:
        settings: Settings of all runs, as `--set`.
        sweep: `KEY=VALUE,VALUE,...`; several keys are combined in every way.
        save_directory: Directory of the trainer. Run N of a sweep writes to its folder `sweep-N`.

    Raises:
        ConfigError: A key has no values, or there are too many runs.
    """
    if not sweep:
        return (tuple(settings),)
    axes = []
    for text in sweep:
        key, _, values = text.partition("=")
        listed = [value.strip() for value in values.split(",")]
        if not key or not all(listed):
            raise ConfigError(f"--sweep {text!r} must be KEY=VALUE,VALUE,...")
        axes.append([f"{key}={value}" for value in listed])
    count = 1
    for axis in axes:
        count *= len(axis)
    if count > MAX_POINTS:
        raise ConfigError(f"the sweep has {count} runs; the largest number is {MAX_POINTS}")
    return tuple(
        (*settings, *point, f"trainer.save_directory={save_directory}/sweep-{number}")
        for number, point in enumerate(itertools.product(*axes))
    )
