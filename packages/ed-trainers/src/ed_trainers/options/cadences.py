"""How often a run logs, evaluates and saves: values of the options, and their agreement.

A number of at least 1 counts steps, and a smaller number is a share of the steps of the run, as in
transformers and TRL. A strategy `epoch` and a number per epoch (as in Axolotl) place the tasks
within each epoch. `ed_trainers.batches.Cadence` is the one form that the training loop reads.
"""

from __future__ import annotations

import math
from typing import Annotated

from ed_infra.options import Options
from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from ed_trainers.options.optimizers import LONGEST, conflict


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
Phase = Annotated[float, Field(ge=0, le=LONGEST), AfterValidator(_check_interval)]

#: Strategy -> the options that it may contradict: the steps, and the number of times in an epoch.
STRATEGIES: dict[str, tuple[str, str]] = {
    "save_strategy": ("save_steps", "saves_per_epoch"),
    "eval_strategy": ("evaluation_steps", "evals_per_epoch"),
}


def count_interval_steps(interval: float | None, total_steps: int) -> int | None:
    """Return the whole number of steps of an interval, in a run of `total_steps` steps."""
    if interval is None or interval >= 1:
        return None if interval is None else int(interval)
    return math.ceil(total_steps * interval)  # as in transformers


class CadenceRules(Options):
    """Validators of options that `TrainingArguments` declares."""

    @field_validator("save_strategy", "eval_strategy", check_fields=False)
    @classmethod
    def _agrees_with_the_steps(cls, value: str | None, info: ValidationInfo) -> str | None:
        key, times = STRATEGIES[str(info.field_name)]
        steps, number = info.data.get(key), info.data.get(times)
        if value in ("no", "epoch") and steps is not None:
            raise conflict(f"{info.field_name}: {value} and {key} {steps:g} exclude each other")
        if value in ("no", "epoch") and number is not None:
            raise conflict(f"{info.field_name}: {value} and {times} {number} exclude each other")
        if value == "steps" and steps is None and number is None:
            raise conflict(f"{info.field_name}: steps needs {key}, the number of steps")
        return value

    @field_validator("saves_per_epoch", "evals_per_epoch", check_fields=False)
    @classmethod
    def _are_the_only_steps(cls, value: int | None, info: ValidationInfo) -> int | None:
        ((key, _),) = (pair for pair in STRATEGIES.values() if pair[1] == info.field_name)
        steps = info.data.get(key)
        if value is not None and steps is not None:
            raise conflict(f"{info.field_name} {value} and {key} {steps:g} exclude each other")
        return value

    @field_validator("load_best_model_at_end", "save_best_k", check_fields=False)
    @classmethod
    def _checkpoints_are_evaluated(
        cls, value: bool | int | None, info: ValidationInfo
    ) -> bool | int | None:
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
