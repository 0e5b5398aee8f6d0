"""The description of a run in a checkpoint, and the check whether another run may resume from
it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ed_infra.config.fields import FIELDS, SECTION
from ed_infra.errors import CheckpointError

from ed_trainers.arguments import PREVIEW_OPTIONS
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
    "frozen_parameters",
    "steps_per_generation",
    "num_iterations",
    "sync_ref_model",
)

#: Options that the loop alone reads. Their change does not change the weights of a step.
LOOP_OPTIONS = frozenset(
    (
        "num_train_epochs",
        "max_training_steps",
        "per_epoch_training_steps",
        "training_time_limit",
        "eval_batch_size",
        "max_evaluation_steps",
        "save_directory",
        "save_steps",
        "saves_per_epoch",
        "save_strategy",
        "save_interval_minutes",
        "save_total_limit",
        "do_last_save",
        "merge_adapters",
        "resume_if_possible",
        "mirror_address",
        "memory_directory",
        "memory_save_steps",
        "log_steps",
        "log_strategy",
        "weight_distribution_log_steps",
        "weight_distribution_pattern",
        "report_steps",
        "num_completions_to_log",
        "evaluation_steps",
        "evals_per_epoch",
        "eval_strategy",
        "eval_on_start",
        "save_best_k",
        "load_best_model_at_end",
        "metric_for_best_model",
        "greater_is_better",
        "use_ema",
        "progress_bar_type",
        "use_tensorboard",
        "report_to",
        "project",
        "run_name",
        "tracker_entity",
        "peak_flops_per_device",
        *PREVIEW_OPTIONS,
        "benchmark_interval",
        "benchmarks",
        "benchmark_options",
        "profile_start_step",
        "profile_steps",
    )
)

# Options that change the memory and the time of a step. `max_length` is part of the fingerprint of
# the data.
_SAME_RESULT = frozenset(
    ("image_feature_cache_gib", "lmhead_chunksize", "log_grad_norms", "max_length")
)
# Fields of a configuration that do not change the results of a model.
_OTHER_FIELDS = FIELDS.keys() | {
    *("transformers_version", "dtype", "torch_dtype", "architectures", SECTION)
}

#: Files and folders of a run in its directory. A run that starts again moves them aside.
RUN_FILES = (
    *("checkpoints", "metrics.jsonl", "samples.ledger", "tensorboard", "model", "adapter"),
    *("config.yaml", "environment.json", "summary.json", "report.html", "serve.yaml"),
    *("completions.jsonl", "eval", "benchmarks"),
)


def compare_runs(
    saved: Mapping[str, Any],
    run: Mapping[str, Any],
    location: str,
    difference: Callable[[Mapping[str, Any], int], str | None],
    step: int = 0,
) -> str | None:
    """Compare the run of a checkpoint with the present run.

    Args:
        saved: result of `describe_run` in the checkpoint.
        run: result of `describe_run` for the present run.
        location: the checkpoint, for messages.
        difference: describes the difference between the present data and the data of a saved loader
            state, if their fingerprints differ; None if the batches before the step are the same.
        step: number of updates of the checkpoint.

    Returns:
        A description of the changes that affect the results; None if there are none.

    Raises:
        CheckpointError: the checkpoint belongs to another run, or to a finished run with other
            values.
    """
    saved_arguments, now = saved["arguments"], run["arguments"]
    # A missing name is an option that did not exist when the checkpoint was written.
    changed_names = [name for name, value in saved_arguments.items() if now.get(name) != value]
    for name in MUST_MATCH:
        if name in changed_names:
            raise CheckpointError(
                f"{location} was trained with {name} {saved_arguments[name]!r}, now it is "
                f"{now.get(name)!r}: change it back, or use another save_directory "
                "(resume_if_possible=False moves this run aside)",
                field=name,
            )
    is_other_data = saved.get("fingerprint") != run.get("fingerprint")
    data_difference = difference(saved["loader"], step) if is_other_data else None
    if data_difference is not None:
        raise CheckpointError(
            f"{location} was trained on other data than train_dataset contains now "
            f"({data_difference}): change it back, or use another save_directory "
            "(resume_if_possible=False moves this run aside)"
        )
    changed = {
        name: (saved_arguments[name], now.get(name))
        for name in changed_names
        if name not in LOOP_OPTIONS and name not in _SAME_RESULT
    }
    changed |= _compare_values(saved.get("settings"), run.get("settings"))
    changed |= _compare_values(_list_model_fields(saved), _list_model_fields(run))
    if saved.get("total_steps") != run.get("total_steps"):
        changed["total steps"] = saved.get("total_steps"), run.get("total_steps")
    # Checkpoints of earlier versions do not contain the dtype.
    if saved.get("param_dtype", run.get("param_dtype")) != run.get("param_dtype"):
        changed["param_dtype"] = saved["param_dtype"], run.get("param_dtype")
    if not changed:
        return None
    unquoted_names = ("total steps", "param_dtype")
    listing = ", ".join(
        f"{name} {old} -> {new}" if name in unquoted_names else f"{name} {old!r} -> {new!r}"
        for name, (old, new) in changed.items()
    )
    if step >= run["total_steps"]:
        key = next((name for name in changed if name not in unquoted_names), "max_training_steps")
        raise CheckpointError(
            f"{location} is the end of a run that finished with other values ({listing}), and "
            "training with the present values would change nothing: set another save_directory "
            f"for a new run, more than {step} steps (max_training_steps) to continue this run "
            "with the present values, or change them back",
            field=key,
        )
    return f"changed since that checkpoint: {listing}"


def _list_model_fields(run: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the fields of the model's configuration that determine its results, by key."""
    fields = (run.get("model") or {}).get("config")
    if fields is None:
        return None
    names = (name for name in fields if name not in _OTHER_FIELDS)
    carried = (run.get("model") or {}).get("carried_tensors")
    copied = {} if carried is None else {"tensors outside of the model": carried["sha256"]}
    return {f"model.config.{name}": fields[name] for name in names if name[:1] != "_"} | copied


def _compare_values(
    saved_values: Mapping[str, Any] | None, now: Mapping[str, Any] | None
) -> dict[str, tuple[Any, Any]]:
    """Return name -> both values where they differ.

    A name that is missing in the earlier values did not exist when the checkpoint was written.
    """
    if saved_values is None or now is None:
        return {}
    return {n: (value, now.get(n)) for n, value in saved_values.items() if now.get(n) != value}


def describe_run(
    arguments: TrainingArguments,
    *,
    total_steps: int,
    loader: Mapping[str, Any],
    fingerprint: str | None,
    model: Mapping[str, Any] | None = None,
    param_dtype: str | None = None,
    settings: Mapping[str, Any] | None = None,
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
        settings: values outside of the arguments that determine the result, by key.
    """
    return {
        "arguments": arguments.model_dump(mode="json"),
        "total_steps": total_steps,
        "loader": dict(loader),
        "fingerprint": fingerprint,
        "model": model,
        "param_dtype": param_dtype,
        "settings": None if settings is None else dict(settings),
    }


def move_aside(directory: Path) -> Path | None:
    """Move the files of an earlier run to `<directory>/earlier-<n>`; return None without such
    files.

    Args:
        directory: the run's `save_directory`.
    """
    present = [directory / name for name in RUN_FILES if (directory / name).exists()]
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
