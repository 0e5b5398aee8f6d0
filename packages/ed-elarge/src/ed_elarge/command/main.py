"""The program `elarge`: `elarge FILE` executes a run file, and the other commands have names.

Exit codes: 0 success; 1 a failure that is not an input error, or checkpoints that differ; 2 invalid
input (a message, and a traceback only with `--verbose`); 130 interrupted.
"""

from __future__ import annotations

import os
import signal
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

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
from ed_elarge.exits import leave_other_processes

#: Options of the program itself; every other first word that is no command is a run file.
_OWN = ("--help", "--version", "--install-completion", "--show-completion")


class _FileFirst(TyperGroup):
    """A group in which a first word that is no command is the run file of the command `run`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the command `run` before a run file."""
        completes = ctx.resilient_parsing  # of the shell: the words are not a whole command
        is_command = not args or args[0] in self.commands or args[0] in _OWN
        if not completes and (not args or not is_command):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_FileFirst, pretty_exceptions_enable=False, rich_markup_mode=None)


def _version(is_requested: bool) -> None:
    if is_requested:
        from importlib.metadata import version

        print(f"elarge {version('ed-elarge')}")
        raise typer.Exit()


@app.callback()
def program(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Train, evaluate, generate with and serve language models.

    \b
    elarge FILE              execute the actions of a run file
    elarge FILE --dry-run    check the file and print its actions
    elarge ./train           execute a run file that has the name of a command
    """


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
for _name, _function in _COMMANDS.items():
    app.command(_name)(_function)
app.command("member", hidden=True)(launches.member)
_FLAGS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
app.command("chat", context_settings=_FLAGS)(machine.chat)
app.add_typer(measurements.app, name="bench")


def main() -> None:
    """Entry point of `elarge` and of `python -m ed_elarge`."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a background job of a script
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # transformers reads the variable at import, and advises to install torch, which is not used
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        app(prog_name="elarge")
    except Exception:
        leave_other_processes()
        raise
