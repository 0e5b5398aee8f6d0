"""What a checkpoint says about its run, and whether another run may go on from it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ed_infra.errors import CheckpointError

from ed_trainers.options.base import TrainingArguments

#: Arguments that give another run, or another shape of optimizer state, when they change.
MUST_MATCH = (
    "trainer_type",
    "seed",
    "total_batch_size",
    "optimizer",
    "master_dtype",
    "skip_bad_steps",
    "trainable_rules",
    "steps_per_generation",
    "num_iterations",
    "sync_ref_model",
)

# Arguments that change what is computed, though a changed run can still go on from the checkpoint.
_CHANGE_THE_COURSE = (
    "learning_rate",
    "learning_rate_end",
    "scheduler",
    "scheduler_kwargs",
    "warmup_steps",
    "optimizer_kwargs",
    "weight_decay",
    "learning_rate_rules",
    "weight_decay_rules",
    "clip_grad",
    "sigma_factor",
    "rolling_interval_length",
    "label_smoothing_factor",
    "z_loss_coefficient",
    "neftune_noise_alpha",
    "ref_model_mixup_alpha",
    "ref_model_sync_steps",
    "gradient_accumulation_steps",
)


def compare_runs(
    saved: Mapping[str, Any],
    run: Mapping[str, Any],
    where: str,
    difference: Callable[[Mapping[str, Any]], str],
) -> str | None:
    """Compare the run that wrote a checkpoint with the present one.

    Args:
        saved: as `describe_run` gave it then.
        run: as it gives it now.
        where: the checkpoint, for messages.
        difference: says, where fingerprints differ, how the present data differ from the data
            whose loader state was saved.

    Returns:
        What changed and changes the course of the run; None if nothing did.

    Raises:
        CheckpointError: it is another run.
    """
    before, now = saved["arguments"], run["arguments"]
    # A name that is missing is an option that did not exist when the checkpoint was written.
    changed_names = [name for name, value in before.items() if now.get(name) != value]
    for name in MUST_MATCH:
        if name in changed_names:
            raise CheckpointError(
                f"{where} was trained with {name} {before[name]!r}, now it is "
                f"{now.get(name)!r}: change it back, or take another save_directory "
                "(resume_if_possible=False moves this run aside)"
            )
    if saved.get("fingerprint") != run.get("fingerprint"):
        raise CheckpointError(
            f"{where} was trained on other data than train_dataset now gives "
            f"({difference(saved['loader'])}): change it back, or take another save_directory "
            "(resume_if_possible=False moves this run aside)"
        )
    changed = [
        f"{name} {before[name]!r} -> {now.get(name)!r}"
        for name in _CHANGE_THE_COURSE
        if name in changed_names
    ]
    if saved.get("total_steps") != run.get("total_steps"):
        changed.append(f"total steps {saved.get('total_steps')} -> {run.get('total_steps')}")
    return f"changed since that checkpoint: {', '.join(changed)}" if changed else None


def describe_run(
    arguments: TrainingArguments,
    *,
    total_steps: int,
    loader: Mapping[str, Any],
    fingerprint: str | None,
    model: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what a checkpoint says about its run, in JSON values.

    Args:
        arguments: all of them are recorded.
        total_steps: updates of the whole run.
        loader: the loader's `state_dict()`.
        fingerprint: identity of data and order, or None where the loader has none.
        model: what `ed_trainers.convert` makes the model from; see `saved.model_facts`.
    """
    return {
        "arguments": arguments.model_dump(mode="json"),
        "total_steps": total_steps,
        "loader": dict(loader),
        "fingerprint": fingerprint,
        "model": model,
    }


def move_aside(directory: Path, names: tuple[str, ...]) -> Path | None:
    """Move an earlier run's files into `<directory>/earlier-<n>`; None if there are none.

    Args:
        directory: the run's `save_directory`.
        names: files and folders in it that belong to a run.
    """
    present = [directory / name for name in names if (directory / name).exists()]
    if not present:
        return None
    target = free_name(directory, "earlier")
    target.mkdir()
    for path in present:
        path.rename(target / path.name)
    return target


def free_name(directory: Path, name: str) -> Path:
    """Return `<directory>/<name>-<n>` for the first n that is not taken."""
    return next(p for n in itertools.count(1) if not (p := directory / f"{name}-{n}").exists())
