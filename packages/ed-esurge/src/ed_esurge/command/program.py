"""What the commands of `esurge` and `elarge` have in common: help, words, results, exit codes.

A command is a function. Its parameters are options of typer, and records of options whose fields
become flags (`ed_esurge.command.flags`). It returns an exit code, or a `Result`.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TextIO

import typer
from ed_infra.errors import did_you_mean
from typer.core import TyperCommand, TyperGroup

from ed_esurge.command.flags import SEVERAL, expand_records

if TYPE_CHECKING:
    from typer._click import Context
    from typer._click.formatting import HelpFormatter

#: Key of `Context.meta` with the name of the command and its words.
WORDS_KEY = "ed_esurge.words"
_NUMBER = re.compile(r"-\d+|-\d*\.\d+")

Quiet = Annotated[bool, typer.Option("--quiet", help="Print only warnings, errors and the result.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print the result, or an error, as one JSON object.")
]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Log more, and show tracebacks of bad input.")
]


@dataclass(frozen=True)
class Result:
    """The result of a command: the object that `--json` prints, and the exit code."""

    values: Mapping[str, object]
    code: int = 0


@dataclass
class _Output:
    """Where the running command prints: see `open_output`."""

    stream: TextIO | None = None
    is_quiet: bool = False
    is_json: bool = False
    #: Whether the object of the result was printed.
    has_object: bool = False


_PLAIN = _Output()
_output: ContextVar[_Output] = ContextVar("output", default=_PLAIN)


@contextmanager
def open_output(is_quiet: bool, is_json: bool) -> Iterator[None]:
    """Set what the command of the block prints.

    With `--quiet`, standard output has only the result. With `--json`, it has only the object, and
    other lines are printed to standard error.
    """
    if not (is_quiet or is_json):
        yield
        return
    token = _output.set(_Output(sys.stdout, is_quiet, is_json))
    try:
        with open(os.devnull, "w") as null, redirect_stdout(null if is_quiet else sys.stderr):
            yield
    finally:
        _output.reset(token)


def is_quiet() -> bool:
    """Return whether the running command has `--quiet`."""
    return _output.get().is_quiet


def is_json() -> bool:
    """Return whether the running command has `--json`."""
    return _output.get().is_json


def show_result(text: str) -> None:
    """Print a part of the result for people; nothing with `--json`."""
    output = _output.get()
    if not output.is_json:
        print(text, file=output.stream, flush=True)


def show_error(text: str, prefix: str = "error: ") -> None:
    """Print an error: to standard error, or with `--json` as an object to standard output."""
    output = _output.get()
    if output.is_json:
        print(json.dumps({"error": text}), file=output.stream, flush=True)
    else:
        print(f"{prefix}{text}", file=sys.stderr)


def finish(result: Result | int | None) -> int:
    """Print the object of a result with `--json`, and return the exit code."""
    if isinstance(result, Result):
        show_object(result.values)
        return result.code
    return result or 0


def show_object(values: Mapping[str, object]) -> None:
    """Print the object of a result with `--json`, before the command ends; at most once."""
    output = _output.get()
    if output.is_json and not output.has_object:
        output.has_object = True
        text = json.dumps(_make_plain(values), allow_nan=False)
        print(text, file=output.stream, flush=True)


def _make_plain(value: object) -> object:
    """Return a value for JSON, in which a number that is not finite is null."""
    if isinstance(value, Mapping):
        return {str(key): _make_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [*map(_make_plain, value)]
    if not isinstance(value, str | int | float | None):
        convert = getattr(value, "item", None)  # of a number of numpy
        value = convert() if convert else str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def build_command(
    function: Callable[..., Result | int | None],
    run: Callable[..., int],
    *,
    has_result: bool = True,
    has_verbose: bool = False,
) -> Callable[..., None]:
    """Return a function for typer that executes a command and ends the program.

    Args:
        function: the command.
        run: calls a function without arguments and returns the exit code. It has the keyword
            `verbose` if `has_verbose`.
        has_result: whether the command has `--quiet` and `--json`.
        has_verbose: whether the command has `--verbose`.
    """
    call, signature = expand_records(function)
    common = {"quiet": Quiet, "as_json": AsJson} if has_result else {}
    common |= {"verbose": Verbose} if has_verbose else {}
    takes_verbose = "verbose" in signature.parameters

    def command(**values: object) -> None:
        common_values = {name: bool(values.pop(name)) for name in common}
        if takes_verbose:
            values["verbose"] = common_values["verbose"]
        settings = {"verbose": common_values["verbose"]} if has_verbose else {}
        with open_output(common_values.get("quiet", False), common_values.get("as_json", False)):
            raise typer.Exit(run(lambda: call(values), **settings))

    keyword = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter(name, keyword, default=False, annotation=annotation)
        for name, annotation in common.items()
    ]
    own = [one for one in signature.parameters.values() if one.name not in common]
    command.__dict__["__signature__"] = inspect.Signature([*own, *options])
    command.__annotations__ = {}
    command.__doc__ = function.__doc__
    return command


def add_version_option(app: typer.Typer, program: str, description: str) -> None:
    """Add `--version` to a program, whose help begins with a description."""

    def print_version(is_requested: bool) -> None:
        if is_requested:
            from importlib.metadata import version

            print(f"{program} {version(f'ed-{program}')}")
            raise typer.Exit()

    option = typer.Option(
        False, "--version", callback=print_version, is_eager=True, help="Print the version."
    )

    @app.callback(help=description)
    def start_program(version: bool = option) -> None: ...


def parse_words(function: Callable[..., object], words: Sequence[str]) -> dict[str, Any]:
    """Return the arguments that a command would receive from the words after its name.

    Raises:
        ConfigError: a value is invalid.
    """
    received: dict[str, Any] = {}

    @functools.wraps(function)
    def receive(**arguments: object) -> None:
        received.update(arguments)

    app = typer.Typer(add_completion=False)
    command = build_command(receive, lambda work: finish(work()), has_result=False)
    app.command(cls=ProgramCommand)(command)
    typer.main.get_command(app).main(list(words), standalone_mode=False)
    return received


class ProgramCommand(TyperCommand):
    """A command whose help has groups, and whose flags accept several words (`--also A B`).

    A value that begins like a flag is an error, except numbers. Abbreviations are unknown flags.
    """

    def get_params(self, ctx: Context) -> list[Any]:
        """Return the arguments and options; the names of arguments are in capital letters."""
        parameters = super().get_params(ctx)
        for one in parameters:
            if one.param_type_name == "argument" and one.metavar is None:
                one.metavar = str(one.name).upper()
        return parameters

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Keep the words in `ctx.meta`, and repeat the flag before each of several words."""
        ctx.meta[WORDS_KEY] = [str(self.name), *args]
        return super().parse_args(ctx, self._repeat_flags(ctx, args))

    def _repeat_flags(self, ctx: Context, args: Sequence[str]) -> list[str]:
        options: dict[str, Any] = {
            flag: option
            for option in self.get_params(ctx)
            if option.param_type_name == "option"
            for flag in (*option.opts, *option.secondary_opts)
        }
        words, repeated = deque(args), []
        while words:
            word = words.popleft()
            if word == "--":
                return [*repeated, word, *words]
            flag, equals, value = word.partition("=")
            option = options.get(flag)
            if option is None or option.is_flag or (not words and not equals):
                repeated.append(word)
                continue
            if not equals:
                if _is_flag(words[0]) and not ctx.resilient_parsing:
                    ctx.fail(f"Option {flag!r} requires an argument.")
                value = words.popleft()
            flag = next((one for one in option.opts if one.startswith("--")), flag)
            repeated.append(f"{flag}={value}")
            while str(option.metavar).endswith(SEVERAL) and words and not _is_flag(words[0]):
                repeated.append(f"{flag}={words.popleft()}")
        return repeated

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write the arguments, the groups of options, and the options without a group."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for param in self.get_params(ctx):
            row = param.get_help_record(ctx)
            if row is not None:
                group = getattr(param, "rich_help_panel", None)
                title = group.capitalize() if group else "Options"
                is_argument = param.param_type_name == "argument"
                groups.setdefault("Arguments" if is_argument else title, []).append(row)
        if "Options" in groups:
            groups["Options"] = groups.pop("Options")  # after the groups
        for title, rows in groups.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class CommandGroup(TyperGroup):
    """The commands of a program. With `--json`, an error of the words is an object too.

    Attributes:
        tour: text that the program prints without words; empty: an error.
        other_words: word that is no command -> what to write instead.
    """

    tour: ClassVar[str] = ""
    other_words: ClassVar[Mapping[str, str]] = {}

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Print the tour if there are no words."""
        if not args and self.tour and not ctx.resilient_parsing:
            print(self.tour, end="")
            ctx.exit()
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Context, args: list[str]) -> Any:
        """Return the command of the first word, or fail with the nearest command."""
        if args and not ctx.resilient_parsing and args[0] not in self.commands:
            ctx.fail(self.describe_unknown(args[0]))
        return super().resolve_command(ctx, args)

    def describe_unknown(self, word: str, kind: str = "is no command") -> str:
        """Return the message for a word that is no command.

        Args:
            word: the word.
            kind: what is wrong with the word.
        """
        instead = self.other_words.get(word.lower())
        if instead is not None:
            return f"{word!r} {kind}: use `{instead}`"
        names = [name for name, command in self.commands.items() if not command.hidden]
        near, others = did_you_mean(word, names), f"; the commands are {', '.join(names)}"
        return f"{word!r} {kind}{near or others}"

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Execute the command of the words."""
        # transformers reads the variable at import, and advises to install torch, which is not used
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        words = list(sys.argv[1:] if args is None else args)
        is_object = standalone_mode and "--json" in words
        try:
            code = super().main(
                words,
                prog_name,
                complete_var,
                standalone_mode and not is_object,
                windows_expand_args,
                **extra,
            )
        except Exception as error:
            # The class of errors of words is typer's own, without a public name.
            describe = getattr(error, "format_message", None)
            if not is_object or describe is None:
                raise
            print(json.dumps({"error": describe()}))
            code = getattr(error, "exit_code", None)
        if is_object:
            sys.exit(code)
        return code


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and " " not in word and not _NUMBER.fullmatch(word)
