"""The program `elarge`: `elarge FILE` executes a run file, and the other commands have names.

Exit codes: 0 success; 1 a failure that is not an input error, or checkpoints that differ; 2 invalid
input (a message, and a traceback only with `--verbose`); 130 interrupted.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import typer
from ed_esurge.command.program import (
    CommandGroup,
    ProgramCommand,
    add_version_option,
    build_command,
)

from ed_elarge.command import (
    certificates,
    checkpoints,
    explanations,
    files,
    launches,
    machine,
    measurements,
    plans,
    reruns,
    runs,
    serving,
)
from ed_elarge.exits import leave_other_processes, run_work

if TYPE_CHECKING:
    from typer._click import Context

#: Options of the program itself; every other first word that is no command is a run file.
_OWN = ("--help", "--version", "--install-completion", "--show-completion")
#: Flags of `explain`; every other word is a name to explain.
_EXPLAIN_FLAGS = ("--help", "--quiet", "--json", "--verbose")


class _FileFirst(CommandGroup):
    """A group in which a first word that is no command is the run file of the command `run`."""

    tour = """\
elarge trains, evaluates, plans and serves language models. Five commands to start with:

  elarge init lora                write lora.yaml, a commented run file
  elarge lora.yaml                execute it; --dry-run only checks the file
  elarge plan FILE --devices 4090 predict memory and time on hardware that you do not have
  elarge serve SOURCE             serve a run, a model, a GGUF file or a LoRA adapter; chat talks
  elarge explain learning_rate    what a key or a flag means, here and in other programs

To read: docs/quickstart.md, docs/tasks/lora.md, docs/tasks/serve.md, docs/yaml.md (all keys), and
docs/migrate/ for TRL, Axolotl, vLLM and llama.cpp. All commands: elarge --help
"""
    other_words: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("finetune", "fine-tune", "fit", "sft", "tune"), "elarge train FILE"),
        **dict.fromkeys(("check", "validate", "lint"), "elarge FILE --dry-run"),
        **dict.fromkeys(("export", "import", "gguf"), "elarge convert SOURCE TARGET"),
        **dict.fromkeys(("infer", "inference", "sample", "predict"), "elarge generate FILE"),
        **dict.fromkeys(("server", "api", "deploy"), "elarge serve SOURCE"),
        **dict.fromkeys(("estimate", "memory"), "elarge plan FILE --devices 8xH200"),
        **dict.fromkeys(("new", "create", "template"), "elarge init KIND"),
        **dict.fromkeys(("man", "docs", "describe"), "elarge explain KEY"),
        **dict.fromkeys(("env", "info", "status"), "elarge doctor"),
        "benchmark": "elarge bench train FILE",
        "evaluate": "elarge eval FILE",
        "help": "elarge --help",
        "version": "elarge --version",
    }

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Insert the command `run` before a run file, and find the source of `serve` and `chat`."""
        if ctx.resilient_parsing or not args:  # of the shell: the words are not a whole command
            return super().parse_args(ctx, args)
        if args[0] in serving.TO_ENGINE:
            args = serving.route_words(args)
        elif args[0] == "explain":  # the name of a flag is no flag
            own = [word for word in args[1:] if word in _EXPLAIN_FLAGS]
            names = [word for word in args[1:] if word not in (*_EXPLAIN_FLAGS, "--")]
            args = ["explain", *own, *(["--", *names] if names else [])]
        elif args[0] not in (*self.commands, *_OWN):
            if _is_word(args[0]):
                ctx.fail(self.describe_unknown(args[0], "is no command and no run file"))
            args = ["run", *args]
        return super().parse_args(ctx, args)


def _is_word(text: str) -> bool:
    """Return whether a text can only be a mistyped command: no flag, and no name of a file."""
    return text.replace("-", "").isalpha() and text[0] != "-" and not Path(text).exists()


app = typer.Typer(cls=_FileFirst, pretty_exceptions_enable=False, rich_markup_mode=None)
DESCRIPTION = """Train, evaluate, generate with and serve language models.

\b
elarge FILE              execute the actions of a run file
elarge FILE --dry-run    check the file and print its actions
elarge ./train           execute a run file that has the name of a command
elarge                   print a short tour
"""
add_version_option(app, "elarge", DESCRIPTION)

_COMMANDS = {
    "run": runs.run,
    "train": runs.train,
    "eval": runs.evaluate,
    "generate": runs.generate,
    "serve": serving.serve,
    "chat": serving.chat,
    "data": runs.data,
    "plan": plans.plan,
    "ladder": plans.ladder,
    "forget": reruns.forget,
    "branch": reruns.branch,
    "launch": launches.launch,
    "join": launches.join,
    "init": files.init,
    "explain": explanations.explain,
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
ENDLESS = ("chat", "join")
for _name, _function in _COMMANDS.items():
    _command = build_command(_function, run_work, has_result=_name not in ENDLESS, has_verbose=True)
    app.command(_name, cls=ProgramCommand)(_command)
app.command("member", hidden=True)(launches.member)
_FLAGS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
for _name, _function in (("serve", serving.serve_model), ("chat", serving.chat_model)):
    app.command(serving.TO_ENGINE[_name], context_settings=_FLAGS, hidden=True)(_function)
_bench = typer.Typer(
    cls=CommandGroup,
    help="Measure attention, decoding, training and the limits of this machine.",
)
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
