"""The command line: `elarge FILE`, and `elarge data FILE`.

Exit codes: 0 success; 1 a failure that is not an input error; 2 invalid input (a message, and a
traceback only with `--verbose`); 130 interrupted.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from ed_data.errors import DataError
from ed_infra.errors import EasyDeLError

BAD_INPUT, INTERRUPTED = 2, 130

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
data_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def elarge(
    file: Annotated[str | None, typer.Argument(help="The run file (YAML or JSON).")] = None,
    config: Annotated[
        str | None, typer.Option("--config", "-c", help="The run file, by name.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check the file, print the actions, and exit."),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Log more, and show tracebacks of bad input.")
    ] = False,
) -> None:
    """Train, evaluate, generate with and serve a language model as specified in FILE."""
    if (file is None) == (config is None):
        problem = "the run file is missing" if file is None else "the run file is given twice"
        raise typer.BadParameter(f"{problem}: elarge FILE, or elarge --config FILE")
    raise typer.Exit(run_file(file or config or "", dry_run, verbose))


@data_app.command()
def data(
    file: Annotated[str, typer.Argument(help="The run file (YAML or JSON).")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The page; default: data.html in the trainer's directory."
        ),
    ] = None,
    near: Annotated[
        bool, typer.Option("--near", help="Also find nearly equal documents (MinHash).")
    ] = False,
    samples: Annotated[int, typer.Option(min=0, max=100, help="Number of rows to show.")] = 3,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show tracebacks of bad input.")
    ] = False,
) -> None:
    """Report the mixture of FILE: rows, tokens, lengths, fill, duplicates and the first rows."""
    from ed_elarge.actions.data_report import show

    raise typer.Exit(_guarded(lambda: show(file, output, near, samples), verbose))


def run_file(path: str, dry_run: bool = False, verbose: bool = False) -> int:
    """Execute a run file. Invalid input becomes a message and an exit code."""
    return _guarded(lambda: _run(path, dry_run, verbose), verbose)


def _guarded(work: Callable[[], int], verbose: bool) -> int:
    try:
        return work()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except (EasyDeLError, DataError) as error:  # other errors are defects or machine failures
        if verbose:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT


def _run(path: str, dry_run: bool, verbose: bool) -> int:
    from ed_elarge.config import nodes
    from ed_elarge.config.normalize import normalize

    run = normalize(nodes.read(path), require_actions=True)
    for warning in run.warning_texts():
        print(f"warning: {warning}", file=sys.stderr)
    if dry_run:
        from ed_elarge.config.description import describe
        from ed_elarge.config.table import check_machine

        check_machine(run)
        print(run.to_yaml(secrets=False))
        print(describe(run))
        return 0
    from ed_elarge.actions.execution import execute

    return execute(run, verbose=verbose)


def main() -> None:
    """Entry point of `elarge` and of `python -m ed_elarge`.

    `elarge data FILE` is a separate command; write `elarge ./data` for a run file named `data`.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a background job of a script
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.argv[1:2] == ["data"]:
        data_app(sys.argv[2:], prog_name="elarge data")
    app(prog_name="elarge")


if __name__ == "__main__":
    main()
