"""The command line: server, conversation and load test for a model directory or hub id.

`python -m ed_esurge` is the same program. A command is a function (`ed_esurge.command.program`) and
an entry of `COMMANDS`.

Exit codes: 0 success; 2 invalid input (one message); 130 interrupted.
"""

from __future__ import annotations

import inspect
import logging
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import typer
from ed_infra.errors import ConfigError, EasyDeLError
from ed_infra.host_memory import pause_collection
from ed_infra.logging import show_messages

from ed_esurge.command.foreign_flags import NOTES, translate_flags
from ed_esurge.command.program import (
    CommandGroup,
    ProgramCommand,
    Result,
    add_version_option,
    build_command,
    finish,
    is_json,
    is_quiet,
    show_error,
)

if TYPE_CHECKING:
    from typer._click import Context

BAD_INPUT, INTERRUPTED = 2, 130
#: Command -> its description and its function, whose module is imported only for that command.
COMMANDS = {
    "serve": ("Serve a model behind an OpenAI-compatible API.", "serve:serve"),
    "chat": ("Talk with a model in the terminal.", "chat:chat"),
    "run-batch": ("Answer the requests of a file.", "run_batch:run_batch"),
    "join": ("Start a replica for a server on another host.", "replicated:join"),
    "bench": ("Put load on a server and measure it.", "bench:bench"),
    "bench-serve": (
        "Load test with arrival times and data sets; also `bench serve`.",
        "bench_serve:bench_serve",
    ),
}
#: Commands with a result, which have `--quiet` and `--json`.
RESULTS = ("serve", "run-batch", "bench", "bench-serve")


class _LateCommand(ProgramCommand):
    """A command whose function is imported, and whose flags are built, when they are needed."""

    _is_loaded = False

    def get_params(self, ctx: Context) -> list[Any]:
        """Return the arguments and options."""
        if not self._is_loaded:
            self._is_loaded = True
            name = str(self.name)
            function = _load(name)
            app = typer.Typer(add_completion=False)
            app.command()(build_command(function, run_work, has_result=name in RESULTS))
            command = typer.main.get_command(app)
            self.params, self.callback = command.params, command.callback
            self.help = inspect.getdoc(function)
        return super().get_params(ctx)

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Read the flags of other servers, too, if the command serves a model."""
        if self.name == "serve" and not ctx.resilient_parsing:
            try:
                translation = translate_flags(args)
            except ConfigError as error:
                ctx.fail(str(error))
            args = translation.words
            ctx.meta[NOTES] = translation.notes
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Context) -> Any:
        """Print the flags of other servers without an effect, and execute the command."""
        notes = ctx.meta.get(NOTES)
        if notes and not ctx.params.get("quiet"):
            print(f"flags without an effect here: {'; '.join(notes)}", file=sys.stderr)
        return super().invoke(ctx)


class _Esurge(CommandGroup):
    tour = """\
esurge serves language models. Five commands to start with:

  esurge serve MODEL                      serve a directory, a GGUF file, a LoRA adapter or a hub id
  esurge chat MODEL                       talk with a model in this terminal
  esurge bench --url http://HOST:PORT/v1  measure a running server
  esurge run-batch MODEL -i FILE -o FILE  answer the requests of a file
  esurge COMMAND --help                   all flags of a command, with their defaults

Flags of vLLM and llama.cpp are understood, and `elarge explain FLAG` states what one means.
To read: docs/serving/start.md, and docs/migrate/ for other servers. `elarge` trains models.
"""
    other_words: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("server", "start", "launch", "api", "llm"), "esurge serve MODEL"),
        **dict.fromkeys(("complete", "generate", "talk", "cli"), "esurge chat MODEL"),
        **{word: f"elarge {word} FILE" for word in ("train", "eval", "plan", "quantize", "init")},
        **dict.fromkeys(("benchmark", "perf", "loadtest"), "esurge bench MODEL"),
        "batch": "esurge run-batch MODEL -i FILE -o FILE",
        "help": "esurge --help",
        "version": "esurge --version",
        "run": "esurge chat MODEL",
    }

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Read `bench serve` as `bench-serve`."""
        if args[:2] == ["bench", "serve"]:
            args = ["bench-serve", *args[2:]]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_Esurge, pretty_exceptions_enable=False, rich_markup_mode=None)
add_version_option(app, "esurge", "Serve, chat with and measure language models.")


def _load(name: str) -> Callable[..., Result | int | None]:
    with pause_collection():
        return pkgutil.resolve_name(f"ed_esurge.command.{COMMANDS[name][1]}")


def _do_nothing() -> None:
    """Take the place of a function that is not imported."""


for _name, (_help, _) in COMMANDS.items():
    app.command(_name, cls=_LateCommand, help=_help)(_do_nothing)


def run_work(work: Callable[[], Result | int | None]) -> int:
    """Call a function, print its messages and its result, and return the exit code."""
    show_messages(logging.WARNING if is_quiet() else logging.INFO)
    try:
        return finish(work())
    except KeyboardInterrupt:
        if is_json():
            show_error("interrupted")
        return INTERRUPTED
    except EasyDeLError as error:
        show_error(str(error))
        return BAD_INPUT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of the arguments (default: `sys.argv`) and return the exit code."""
    words = None if arguments is None else list(arguments)
    try:
        app(args=words, prog_name="esurge")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    return 0
