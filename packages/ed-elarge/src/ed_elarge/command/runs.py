"""Commands that execute a run file: all of its actions, or one of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from ed_esurge.command.program import Result, show_result

from ed_elarge.exits import run_work

if TYPE_CHECKING:
    from ed_elarge.errors import Document

File = Annotated[str, typer.Argument(help="The run file (YAML or JSON).")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check the file, print the actions, and exit.")
]
RunSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a value of the file: --set trainer.learning_rate=1e-5. Repeatable.",
    ),
]


def run(
    file: Annotated[str | None, typer.Argument(help="The run file (YAML or JSON).")] = None,
    config: Annotated[
        str | None, typer.Option("--config", "-c", help="The run file, by name.")
    ] = None,
    dry_run: DryRun = False,
    settings: RunSettings = None,
    verbose: bool = False,
) -> Result:
    """Execute the actions of FILE: train, evaluate, generate with and serve a model."""
    if (file is None) == (config is None):
        problem = "the run file is missing" if file is None else "the run file is given twice"
        raise typer.BadParameter(f"{problem}: elarge FILE, or elarge --config FILE")
    return _run(file or config or "", dry_run, verbose, settings or (), "")


def train(
    file: File, dry_run: DryRun = False, settings: RunSettings = None, verbose: bool = False
) -> Result:
    """Train the model of FILE; its other actions are not executed."""
    return _run(file, dry_run, verbose, settings or (), "train")


def evaluate(
    file: File, dry_run: DryRun = False, settings: RunSettings = None, verbose: bool = False
) -> Result:
    """Evaluate the model of FILE on benchmarks, with the parameters of its action `eval`."""
    return _run(file, dry_run, verbose, settings or (), "eval")


def generate(
    file: File, dry_run: DryRun = False, settings: RunSettings = None, verbose: bool = False
) -> Result:
    """Print completions of the model of FILE, with the parameters of its action `generate`."""
    return _run(file, dry_run, verbose, settings or (), "generate")


def data(
    file: File,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The page; default: data.html in the trainer's directory."
        ),
    ] = None,
    with_near_duplicates: Annotated[
        bool, typer.Option("--near", help="Also find nearly equal documents (MinHash).")
    ] = False,
    samples: Annotated[int, typer.Option(min=0, max=100, help="Number of rows to show.")] = 3,
) -> Result:
    """Report the mixture of FILE: rows, tokens, lengths, fill, duplicates and the first rows."""
    from ed_elarge.actions.data_report import show_data

    return show_data(file, output, with_near_duplicates, samples)


def run_file(
    path: str,
    dry_run: bool = False,
    verbose: bool = False,
    settings: Sequence[str] = (),
    only: str = "",
) -> int:
    """Execute a run file and return the exit code.

    Args:
        path: The file.
        dry_run: Whether to check and print only.
        verbose: Whether to log more, and to print tracebacks of invalid input.
        settings: Changes of values, as `--set`.
        only: The one action to execute; empty: all of the file.
    """
    return run_work(lambda: _run(path, dry_run, verbose, settings, only), verbose=verbose)


def _run(path: str, dry_run: bool, verbose: bool, settings: Sequence[str], only: str) -> Result:
    from ed_elarge.config import nodes
    from ed_elarge.config.layers import with_settings

    document = with_settings(nodes.read_yaml(path), settings, nodes.parse_yaml)
    if only:
        document = with_one_action(document, only)
    return execute_document(document, dry_run=dry_run, verbose=verbose)


def execute_document(document: Document, *, dry_run: bool, verbose: bool) -> Result:
    """Execute the actions of a parsed run file, or print them with `dry_run`."""
    from ed_elarge.config.normalize import normalize

    run = normalize(document, require_actions=True)
    for warning in run.warning_texts():
        print(f"warning: {warning}", file=sys.stderr)
    if dry_run:
        from ed_elarge.config.checks.machine import device_warnings
        from ed_elarge.config.description import describe_run_file
        from ed_elarge.config.table import check_machine

        check_machine(run)
        for problem in device_warnings(run):
            print(f"warning: {run.document.show(run.place(problem))}", file=sys.stderr)
        text = run.to_yaml(secrets=False)
        show_result(text)
        show_result(describe_run_file(run))
        return Result({"config": yaml.safe_load(text), "warnings": run.warning_texts()})
    from ed_elarge.actions.execution import execute

    return execute(run, verbose=verbose)


def with_one_action(document: Any, name: str) -> Any:
    """Return a document with one action: the first of this name in the file, or a plain one."""
    from ed_elarge.config.normalize import WRAPPERS
    from ed_elarge.config.table import canonical_action

    top = document.value if isinstance(document.value, Mapping) else {}
    wrapper = next((w for w in WRAPPERS if isinstance(top.get(w), Mapping)), None)
    holder = top[wrapper] if wrapper and "actions" in top[wrapper] else top
    prefix = (wrapper,) if holder is not top else ()
    listed = holder.get("actions")
    items = listed if isinstance(listed, list) else [listed] if isinstance(listed, str) else []
    if isinstance(listed, Mapping):
        items = [{key: value} for key, value in listed.items()]
    item: object = name
    for number, one in enumerate(items):
        first = one if isinstance(one, str) else next(iter(one), "") if one else ""
        if canonical_action(first) == name:
            item = one
            if isinstance(listed, list):  # the locations move with the item
                actions_path = (*prefix, "actions")
                for table in (document.values, document.keys, document.owners):
                    for path in [
                        p
                        for p in table
                        if p[: len(actions_path)] == actions_path and p != actions_path
                    ]:
                        moved = table.pop(path)
                        if path[len(actions_path)] == number:
                            table[(*actions_path, 0, *path[len(actions_path) + 1 :])] = moved
            break
    changed = {**holder, "actions": [item]}
    document.value = {**top, wrapper: changed} if prefix else changed
    return document
