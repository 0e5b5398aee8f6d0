"""The program `elarge`: `elarge FILE` executes a run file, and the other commands have names.

Exit codes: 0 success; 1 a failure that is not an input error, or checkpoints that differ; 2 invalid
input (a message, and a traceback only with `--verbose`); 130 interrupted.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from ed_esurge.command.program import (
    CommandGroup,
    ProgramCommand,
    add_version_option,
    build_command,
)
from ed_infra.errors import did_you_mean

from ed_elarge.command import (
    certificates,
    checkpoints,
    files,
    launches,
    machine,
    measurements,
    plans,
    runs,
)
from ed_elarge.exits import leave_other_processes, run_work

if TYPE_CHECKING:
    from typer._click import Context

#: Options of the program itself; every other first word that is no command is a run file.
_OWN = ("--help", "--version", "--install-completion", "--show-completion")


class _FileFirst(CommandGroup):
    """A group in which a first word that is no command is the run file of the command `run`."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Insert the command `run` before a run file."""
        completes = ctx.resilient_parsing  # of the shell: the words are not a whole command
        if not completes and (not args or args[0] not in (*self.commands, *_OWN)):
            if args and args[0].isalpha() and not Path(args[0]).exists():
                hint = did_you_mean(args[0], self.commands)
                if hint:
                    ctx.fail(f"{args[0]!r} is no command and no run file{hint}")
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_FileFirst, pretty_exceptions_enable=False, rich_markup_mode=None)
DESCRIPTION = """Train, evaluate, generate with and serve language models.

\b
elarge FILE              execute the actions of a run file
elarge FILE --dry-run    check the file and print its actions
elarge ./train           execute a run file that has the name of a command
"""
add_version_option(app, "elarge", DESCRIPTION)

_COMMANDS = {
    "run": runs.run,
    "train": runs.train,
    "eval": runs.evaluate,
    "generate": runs.generate,
    "serve": runs.serve,
    "data": runs.data,
    "plan": plans.plan,
    "launch": launches.launch,
    "join": launches.join,
    "init": files.init,
    "explain": files.explain,
    "schema": files.schema,
    "diff": files.diff,
    "convert": checkpoints.convert,
    "merge": checkpoints.merge,
    "quantize": checkpoints.quantize,
    "compare": checkpoints.compare,
    "certify": certificates.certify,
    "doctor": machine.doctor,
}
#: Commands without a result, which have neither `--quiet` nor `--json`.
ENDLESS = ("serve", "launch", "join")
for _name, _function in _COMMANDS.items():
    _command = build_command(_function, run_work, has_result=_name not in ENDLESS, has_verbose=True)
    app.command(_name, cls=ProgramCommand)(_command)
app.command("member", hidden=True)(launches.member)
_FLAGS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
app.command("chat", context_settings=_FLAGS)(machine.chat)
_bench = typer.Typer(help="Measure attention, decoding, training and the limits of this machine.")
for _function in (
    measurements.attention,
    measurements.decode,
    measurements.limits,
    measurements.train,
):
    _command = build_command(_function, run_work, has_verbose=True)
    _bench.command(_function.__name__, cls=ProgramCommand)(_command)
app.add_typer(_bench, name="bench")


def main() -> None:
    """Entry point of `elarge` and of `python -m ed_elarge`."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a background job of a script
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        app(prog_name="elarge")
    except Exception:
        leave_other_processes()
        raise
