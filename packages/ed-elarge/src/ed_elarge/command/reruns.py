"""The commands `forget` and `branch`: runs that replay a part of a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from ed_esurge.command.program import Result, show_result

from ed_elarge.command.runs import RunSettings

RunDirectory = Annotated[Path, typer.Argument(help="The directory of a run that has trained.")]
PlanOnly = Annotated[
    bool, typer.Option("--dry-run", help="Print the steps and the predicted time, and exit.")
]


def forget(
    run: RunDirectory,
    rows: Annotated[
        list[str],
        typer.Option(
            metavar="ROWS",
            help="Numbers from 0 (3,7-9, INFORM:3), FIELD=VALUE, or a file with rows or hashes. "
            "Repeatable.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Directory of the new run; default: RUN-forgotten."),
    ] = None,
    dry_run: PlanOnly = False,
    keep_tokenizer: Annotated[
        bool,
        typer.Option("--keep-tokenizer", help="Keep a tokenizer that was trained on the rows."),
    ] = False,
) -> Result:
    """Train the model of RUN without some rows, from the last checkpoint before them.

    The result equals, to the last bit, that of a run from the start with mixture.exclude.
    """
    from ed_elarge.reruns.finished_run import FinishedRun
    from ed_elarge.reruns.forgetting import forget_rows, plan_forgetting

    plan = plan_forgetting(FinishedRun.read(run), rows)
    for line in plan.describe():
        show_result(line)
    if dry_run or plan.first_step is None:
        return Result(plan.to_dict())
    target = output or run.with_name(f"{run.resolve().name}-forgotten")
    record = forget_rows(plan, target, keep_tokenizer=keep_tokenizer)
    show_result(f"{record['seconds']:,.0f} s; the model without the rows is in {target}")
    return Result({**record, "directory": str(target)}, int(not record["complete"]))


def branch(
    run: RunDirectory,
    at: Annotated[int, typer.Option(metavar="STEP", help="The last step of the parent's values.")],
    settings: RunSettings = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Directory of the branch; default: RUN-STEP."),
    ] = None,
    dry_run: PlanOnly = False,
) -> Result:
    """Continue RUN from a step with changed values, in a new directory.

    The report of the branch shows its curves and those of RUN, and the changed values.
    """
    from ed_elarge.reruns.branching import plan_branch, run_branch
    from ed_elarge.reruns.finished_run import FinishedRun

    target = output or run.with_name(f"{run.resolve().name}-{at}")
    plan, changed = plan_branch(FinishedRun.read(run), at, target, settings or ())
    for line in plan.describe():
        show_result(line)
    if dry_run:
        return Result(plan.to_dict())
    record = run_branch(plan, changed, target)
    show_result(f"the branch is in {target}; compare: {record['report']}")
    return Result({**record, "directory": str(target)}, int(not record["complete"]))
