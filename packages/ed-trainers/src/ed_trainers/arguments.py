"""The methods and their options, one class each. Imports neither jax nor flax.

A new method is one file with its trainer, and here its options and its row in `METHODS`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ed_infra.errors import unknown_name

from ed_trainers.base_arguments import DECAYING, OPTIMIZERS, Count, Positive, TrainingArguments

__all__ = [
    "ARGUMENTS",
    "METHODS",
    "OPTIMIZERS",
    "SFTArguments",
    "TrainingArguments",
    "arguments_class",
    "idle_options",
    "method",
]


class SFTArguments(TrainingArguments):
    """Supervised fine-tuning, and pre-training: the cross-entropy of the labels."""

    trainer_type: Literal["sft"] = "sft"
    learning_rate: Positive = 2e-5
    lmhead_chunksize: Count | None = None
    """Tokens whose logits exist at once; None lets the loss choose."""


class MethodEntry(NamedTuple):
    """A method: its options, and where its trainer is."""

    arguments: type[TrainingArguments]
    trainer: str


#: `trainer_type` -> the method.
METHODS: dict[str, MethodEntry] = {
    "sft": MethodEntry(SFTArguments, "ed_trainers.sft:SFTTrainer"),
}

#: `trainer_type` -> its options.
ARGUMENTS: dict[str, type[TrainingArguments]] = {
    name: entry.arguments for name, entry in METHODS.items()
}


def method(trainer_type: str) -> MethodEntry:
    """Return the entry of a method.

    Raises:
        ConfigError: the method is not known.
    """
    if not isinstance(trainer_type, str) or trainer_type not in METHODS:
        raise unknown_name("trainer_type", trainer_type, METHODS)
    return METHODS[trainer_type]


def arguments_class(trainer_type: str) -> type[TrainingArguments]:
    """Return the options of a method.

    Raises:
        ConfigError: the method is not known.
    """
    return method(trainer_type).arguments


def idle_options(arguments: TrainingArguments) -> list[tuple[str, str]]:
    """Return the options that were set but do nothing in this run, each with the reason.

    They are no errors: a run file may keep them for a longer run. Who read the file warns about
    them with their line; a key below an option is joined by a dot (`optimizer_kwargs.nesterov`).
    """
    found: list[tuple[str, str]] = []
    chosen = arguments.model_fields_set
    steps = arguments.max_training_steps
    if steps is not None:
        if "num_train_epochs" in chosen:
            found.append(("num_train_epochs", f"max_training_steps ({steps}) sets the length"))
        if arguments.warmup_steps >= steps:
            found.append(
                (
                    "warmup_steps",
                    f"the run ends after {steps} steps, within the warm-up of "
                    f"{arguments.warmup_steps}",
                )
            )
            if arguments.scheduler in DECAYING:
                found.append(("scheduler", "the run ends within the warm-up: nothing decays"))
        for name in ("save_steps", "evaluation_steps"):
            every = getattr(arguments, name)
            if every is not None and every > steps:
                found.append((name, f"the run ends after {steps} steps, before the first {every}"))
    settings = arguments.optimizer_kwargs
    if arguments.optimizer == "sgd" and settings.get("nesterov") and not settings.get("momentum"):
        found.append(("optimizer_kwargs.nesterov", "sgd has no momentum: set momentum as well"))
    return found
