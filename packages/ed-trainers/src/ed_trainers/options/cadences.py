"""How often a run logs, evaluates and saves: values of the options, and their agreement.

A number of at least 1 counts steps, and a smaller number is a share of the steps of the run, as in
transformers and TRL. A strategy `epoch` and a number per epoch (as in Axolotl) place the tasks
within each epoch. `ed_trainers.batches.Cadence` is the one form that the training loop reads.
"""

from __future__ import annotations

import math
from typing import Annotated

from ed_infra.options import Count
from pydantic import AfterValidator, Field, ValidationInfo

from ed_trainers.options.optimizers import LONGEST, Steps, Strategy, StrictFlag, conflict


def _check_interval(value: float, info: ValidationInfo) -> float:
    """Return whole steps as an integer, and a share of the run as it is."""
    if value >= 1 and value != int(value):
        raise conflict(
            f"{info.field_name} {value:g} is no number of steps: write a whole number, or a share "
            "of the run below 1"
        )
    return int(value) if value >= 1 or not value else value


#: Steps between two times of a task, or their share of the run.
Interval = Annotated[float, Field(gt=0, le=LONGEST), AfterValidator(_check_interval)]
#: Steps of a phase, or their share of the run; 0: none.
StepPhase = Annotated[float, Field(ge=0, le=LONGEST), AfterValidator(_check_interval)]

#: Strategy -> the options that it may contradict: the steps, and the number of times in an epoch.
STRATEGY_NUMBERS: dict[str, tuple[str, str]] = {
    "save_strategy": ("save_steps", "saves_per_epoch"),
    "eval_strategy": ("evaluation_steps", "evals_per_epoch"),
}


def _check_strategy(value: str | None, info: ValidationInfo) -> str | None:
    """Check that a strategy agrees with the numbers of steps and of times in an epoch."""
    key, times = STRATEGY_NUMBERS[str(info.field_name)]
    steps, number = info.data.get(key), info.data.get(times)
    if value in ("no", "epoch") and steps is not None:
        raise conflict(f"{info.field_name}: {value} and {key} {steps:g} exclude each other")
    if value in ("no", "epoch") and number is not None:
        raise conflict(f"{info.field_name}: {value} and {times} {number} exclude each other")
    if value == "steps" and steps is None and number is None:
        raise conflict(f"{info.field_name}: steps needs {key}, the number of steps")
    return value


def _check_times(value: int | None, info: ValidationInfo) -> int | None:
    """Check that a number of times in an epoch is the only cadence."""
    ((key, _),) = (pair for pair in STRATEGY_NUMBERS.values() if pair[1] == info.field_name)
    steps = info.data.get(key)
    if value is not None and steps is not None:
        raise conflict(f"{info.field_name} {value} and {key} {steps:g} exclude each other")
    return value


def _check_best(value: int | None, info: ValidationInfo) -> int | None:
    """Check that every saved step is evaluated, if checkpoints are compared."""
    if value and not _each_save_is_evaluated(info):
        save, evaluate = info.data.get("save_steps"), info.data.get("evaluation_steps")
        raise conflict(
            f"{info.field_name} compares checkpoints by their evaluations: save_steps "
            f"({save}) must be a multiple of evaluation_steps ({evaluate}), or save_strategy "
            "and eval_strategy both epoch, or evals_per_epoch a multiple of saves_per_epoch"
        )
    return value


def _each_save_is_evaluated(info: ValidationInfo) -> bool:
    save, evaluate = info.data.get("save_steps"), info.data.get("evaluation_steps")
    if save is None and evaluate is None:
        saves, evaluations = (
            info.data.get(number) or int(info.data.get(strategy) == "epoch")
            for number, strategy in (
                ("saves_per_epoch", "save_strategy"),
                ("evals_per_epoch", "eval_strategy"),
            )
        )
        return bool(saves and evaluations) and evaluations % saves == 0
    if save is None or evaluate is None or (save < 1) != (evaluate < 1):
        return False
    ratio = save / evaluate
    return ratio >= 1 and math.isclose(ratio, round(ratio), rel_tol=1e-9)


#: When a task is repeated; see `STRATEGY_NUMBERS`.
TaskStrategy = Annotated[Strategy | None, AfterValidator(_check_strategy)]
#: Number of times of a task in each epoch.
TimesPerEpoch = Annotated[Count | None, AfterValidator(_check_times)]
#: Number of best checkpoints, and whether the best one is the result.
BestCount = Annotated[Steps | None, AfterValidator(_check_best)]
BestFlag = Annotated[StrictFlag, AfterValidator(_check_best)]
