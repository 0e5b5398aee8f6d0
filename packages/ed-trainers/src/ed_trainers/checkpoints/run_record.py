"""The description of a run in a checkpoint, and the check whether another run may resume from
it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ed_infra.errors import CheckpointError

from ed_trainers.options.base import TrainingArguments

#: Arguments whose change makes a different run, or a different structure of the optimizer state.
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

# Arguments whose change affects the results, although the run can resume from the checkpoint.
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
    """Compare the run of a checkpoint with the present run.

    Args:
        saved: result of `describe_run` in the checkpoint.
        run: result of `describe_run` for the present run.
        where: the checkpoint, for messages.
        difference: describes the difference between the present data and the data of a saved loader
            state, if their fingerprints differ.

    Returns:
        A description of the changes that affect the results; None if there are none.

    Raises:
        CheckpointError: the checkpoint belongs to another run.
    """
    before, now = saved["arguments"], run["arguments"]
    # A missing name is an option that did not exist when the checkpoint was written.
    changed_names = [name for name, value in before.items() if now.get(name) != value]
    for name in MUST_MATCH:
        if name in changed_names:
            raise CheckpointError(
                f"{where} was trained with {name} {before[name]!r}, now it is "
                f"{now.get(name)!r}: change it back, or use another save_directory "
                "(resume_if_possible=False moves this run aside)"
            )
    if saved.get("fingerprint") != run.get("fingerprint"):
        raise CheckpointError(
            f"{where} was trained on other data than train_dataset contains now "
            f"({difference(saved['loader'])}): change it back, or use another save_directory "
            "(resume_if_possible=False moves this run aside)"
        )
    changed = [
        f"{name} {before[name]!r} -> {now.get(name)!r}"
        for name in _CHANGE_THE_COURSE
        if name in changed_names
    ]
    if saved.get("total_steps") != run.get("total_steps"):
        changed.append(f"total steps {saved.get('total_steps')} -> {run.get('total_steps')}")
    # Checkpoints of earlier versions do not contain the dtype.
    if saved.get("param_dtype", run.get("param_dtype")) != run.get("param_dtype"):
        changed.append(f"param_dtype {saved['param_dtype']} -> {run.get('param_dtype')}")
    return f"changed since that checkpoint: {', '.join(changed)}" if changed else None


def describe_run(
    arguments: TrainingArguments,
    *,
    total_steps: int,
    loader: Mapping[str, Any],
    fingerprint: str | None,
    model: Mapping[str, Any] | None = None,
    param_dtype: str | None = None,
) -> dict[str, Any]:
    """Return the description of a run, as JSON values.

    Args:
        arguments: all options are recorded.
        total_steps: number of updates of the whole run.
        loader: the loader's `state_dict()`.
        fingerprint: identity of data and order; None if the loader has none.
        model: the facts from which `ed_trainers.convert` creates the model; see
            `saved.model_facts`.
        param_dtype: dtypes of the trained parameters.
    """
    return {
        "arguments": arguments.model_dump(mode="json"),
        "total_steps": total_steps,
        "loader": dict(loader),
        "fingerprint": fingerprint,
        "model": model,
        "param_dtype": param_dtype,
    }


def move_aside(directory: Path, names: tuple[str, ...]) -> Path | None:
    """Move the files of an earlier run to `<directory>/earlier-<n>`; return None without such
    files.

    Args:
        directory: the run's `save_directory`.
        names: names of the files and folders of a run in this directory.
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
    """Return `<directory>/<name>-<n>` for the first unused n."""
    return next(p for n in itertools.count(1) if not (p := directory / f"{name}-{n}").exists())
