"""Checks of training and evaluation: the method, its data, its other models, and tasks.

As in `ed_elarge.config.checks.model_fields`, each function receives the whole run and yields
problems whose paths start at the sections. Checks of an action yield paths that start at its
parameters.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from ed_data.checks import (
    find_unsupported_keys,
    without_recordings,
    without_tokens,
    without_transcripts,
)
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError, did_you_mean
from ed_infra.options import explain_error
from ed_trainers.arguments import ROLES
from ed_trainers.options.online import OnlineArguments, RewardedArguments
from pydantic import ValidationError

from ed_elarge import heldout_tasks
from ed_elarge.config import local_tasks
from ed_elarge.config.action_options import EvalOptions
from ed_elarge.config.checkpoint_tasks import explain_task
from ed_elarge.config.run_config import Action, RunConfig
from ed_elarge.config.sections import EvalSection
from ed_elarge.config.validation import validate_values
from ed_elarge.errors import Problem, ValuePath

#: Tasks of models that generate text.
GENERATING = (
    TaskType.CAUSAL_LM,
    TaskType.SEQUENCE_TO_SEQUENCE,
    TaskType.IMAGE_TEXT_TO_TEXT,
    TaskType.ANY_TO_ANY,
)


def task(run: RunConfig) -> Iterator[Problem]:
    """Check that the method trains models for the task of `model.task`."""
    if run.model is None or run.trainer is None or run.is_broken("trainer"):
        return
    model_task = run.model.task
    # A causal language model without its head is the base of every other task.
    if model_task not in (None, TaskType.AUTO_BIND, TaskType.CAUSAL_LM, *run.tasks):
        task_names = ", ".join(repr(task.value) for task in run.tasks)
        message = f"{run.method} trains no model for {model_task.value!r} (it trains: {task_names})"
        yield Problem(("model", "task"), message)


def task_of_checkpoint(run: RunConfig) -> Iterator[Problem]:
    """Check that the checkpoint has a model for the task of the run."""
    model, config = run.model, run.stored_config
    if model is None or model.name_or_path is None or config is None or not run.has_valid_task:
        return
    reason = explain_task(model.name_or_path, config, run.task)
    if reason is not None:
        key = "name_or_path" if model.task is None else "task"
        yield Problem(("model", key), f"{reason}: set another model.task, or another model")


def visual_rows(run: RunConfig) -> Iterator[Problem]:
    """Reject images in the data of a model without images."""
    if run.mixture is None or run.trainer is None or run.takes_prompts or run.has_images:
        return
    if not run.has_valid_task:
        return
    for path, message in without_tokens(run.mixture):
        reason = f"the model is for {run.task.value!r}: set model.task: image-text-to-text"
        yield Problem(("mixture", *path), f"{message.partition(',')[0]}, and {reason}")


def data_of_task(run: RunConfig) -> Iterator[Problem]:
    """Reject keys of the data that the task of the method does not support."""
    if run.mixture is None or run.trainer is None or run.takes_prompts or not run.has_valid_task:
        return
    for path, message in find_unsupported_keys(run.mixture, run.schema):
        yield Problem(("mixture", *path), message)


def check_speech_rows(run: RunConfig) -> Iterator[Problem]:
    """Reject keys of recordings in the data of other models."""
    if run.mixture is None or run.trainer is None or not run.has_valid_task:
        return
    if run.has_audio:
        return
    refused = without_transcripts if run.has_recordings else without_recordings
    for path, message in refused(run.mixture):
        reason = f"the model is for {run.task.value!r}"
        yield Problem(("mixture", *path), f"{message}; {reason}")


def check_sequence_length(run: RunConfig) -> Iterator[Problem]:
    """Check that the sequence length is set once and does not exceed the model's positions."""
    trainer, mixture = run.trainer, run.mixture
    if mixture is None or run.is_broken("trainer"):
        return
    if run.takes_prompts:
        if mixture.pack_tokens:
            message = f"{run.method} reads prompts, which are not packed: omit the key"
            yield Problem(("mixture", "pack_tokens"), message)
        return
    length, source = run.sequence_length
    if not source:
        return
    trainer_length = trainer.max_length if trainer is not None else None
    text_length = mixture.tokenization.max_length
    if trainer_length is not None and trainer_length != length:
        yield Problem(
            ("trainer", "max_length"),
            f"{trainer_length} differs from {source} ({length}), which sets the sequence length of "
            "packed rows: keep one of them",
        )
    if text_length is not None and length is not None and text_length > length:
        yield Problem(
            ("mixture", "tokenization", "max_length"),
            f"{text_length} is more than {source} ({length}): a text cannot be longer than a "
            "sequence; lower it, or omit it",
        )
    limit = run.known_positions
    if length is not None and limit is not None and length > limit:
        yield Problem(
            tuple(source.split(".")),
            f"{length} is more than the model's max_position_embeddings ({limit})",
        )


def asynchronous(run: RunConfig) -> Iterator[Problem]:
    """Check that the method can train on samples of other processes."""
    section, trainer = run.asynchronous, run.trainer
    if section is None or trainer is None or run.is_broken("trainer"):
        return
    if not isinstance(trainer, OnlineArguments):
        yield Problem(("asynchronous",), f"{run.method} samples no completions: omit it", True)
        return
    if section.environment not in (None, run.environment):
        message = f"differs from trainer.environment ({run.environment}): keep one of them"
        yield Problem(("asynchronous", "environment"), message)
    if section.environment is not None and trainer.environment is None and run.has_held_out:
        message = "held-out prompts need an environment too: write it as trainer.environment"
        yield Problem(("asynchronous", "environment"), message)
    if run.has_images:
        message = "images are not sent to other processes: omit the section"
        yield Problem(("asynchronous",), message, True)
    if section.max_staleness > 0 and not getattr(trainer, "corrects", False):
        yield Problem(
            ("asynchronous", "max_staleness"),
            f"{section.max_staleness} trains on samples of earlier weights, and {run.method} does "
            "not correct them: set it to 0, or use grpo, gspo, gfpo or rlvr with "
            "importance_sampling_correction",
        )


def data_of_trainer(run: RunConfig) -> Iterator[Problem]:
    """Check that the data have what options of the trainer read."""
    trainer, mixture = run.trainer, run.mixture
    if trainer is None or mixture is None or not run.will("train"):
        return
    hold_out = "set mixture.eval_fraction or mixture.eval_informs"
    if not run.has_held_out:
        for name in ("load_best_model_at_end", "save_best_k"):
            if getattr(trainer, name):
                message = f"compares evaluations, and no rows are held out: {hold_out}"
                yield Problem(("trainer", name), message)
        sources = trainer.generation_prompts or trainer.generation_use_train_prompts
        if trainer.generation_interval is not None and not sources:
            message = f"there are no prompts: set generation_prompts, or {hold_out}"
            yield Problem(("trainer", "generation_interval"), message)
    lengths = (trainer.max_training_steps, trainer.per_epoch_training_steps)
    if mixture.streaming and lengths == (None, None):
        message = (
            "a stream has no length: set trainer.max_training_steps, or "
            "trainer.per_epoch_training_steps"
        )
        yield Problem(("mixture", "streaming"), message)
    ahead = "precompute_ref_log_probs"
    if getattr(trainer, ahead, False) and mixture.streaming:
        message = "reads all rows before training, and mixture.streaming reads them once: omit one"
        yield Problem(("trainer", ahead), message)
    elif getattr(trainer, ahead, False) and run.has_images:
        message = "stores log-probabilities by tokens, and answers also depend on images: omit it"
        yield Problem(("trainer", ahead), message)
    cache = "image_feature_cache_gib"
    if getattr(trainer, cache) is not None and run.has_valid_task and not run.has_images:
        yield Problem(("trainer", cache), "the model reads no images: omit the key")


def fixed_reference(run: RunConfig) -> Iterator[Problem]:
    """Reject a synchronized reference that is the frozen base of the adapters."""
    if run.adapters is not None and getattr(run.trainer, "sync_ref_model", False):
        yield Problem(
            ("trainer", "sync_ref_model"),
            "the reference of a model with adapters is its base, which is not trained: omit "
            "sync_ref_model, or train without the sections lora and quantization.model",
        )


def check_other_models(run: RunConfig) -> Iterator[Problem]:
    """Check that the other models are those that the method reads."""
    if run.trainer is None:
        return
    entry = run.method_entry
    reads = [*entry.needs, *entry.may_read]
    for name, role in ROLES.items():
        section = role.section
        if section in run.written and name not in reads and run.actions:
            listing = (
                ", ".join(ROLES[role_name].section for role_name in reads if role_name in ROLES)
                or "no other model"
            )
            message = f"{run.method} does not read {section} (it reads {listing}): omit the section"
            yield Problem((section,), message, True)
        if name in entry.needs and section not in run.written:
            message = f"{run.method} needs the section {section!r}: {section}: {{name_or_path: …}}"
            yield Problem(("trainer", "trainer_type"), message)


def rewards(run: RunConfig) -> Iterator[Problem]:
    """Check that a method that trains on rewards has a reward."""
    trainer = run.trainer
    if not isinstance(trainer, RewardedArguments) or not run.will("train"):
        return
    judged = getattr(trainer, "judge", None) is not None
    judged = judged or run.environment is not None
    if not (trainer.reward_functions or judged or "reward_model" in run.written):
        message = (
            f'{run.method} needs a reward: set reward_functions, such as ["rewards.py:score"], '
            "or the section reward_model"
        )
        yield Problem(("trainer", "trainer_type"), message)


def generates(run: RunConfig, action: Action) -> Iterator[Problem]:
    """Check that the model of an action generates text."""
    if run.task not in GENERATING and run.has_valid_task:
        message = (
            f"the model is for {run.task.value!r} and generates no text: omit the action "
            f"{action.name}"
        )
        if run.has_audio:
            message = f"the model reads recordings: use the action transcribe, not {action.name}"
        yield Problem((), message, True)


def transcribes(run: RunConfig, action: Action) -> Iterator[Problem]:
    """Check that the model of an action reads recordings."""
    unnamed = run.trainer is None and run.model is not None and run.model.task is None
    if not run.has_audio and run.task != TaskType.AUTO_BIND and not unnamed and run.has_valid_task:
        message = (
            f"the model is for {run.task.value!r} and reads no recordings: omit the action "
            f"{action.name}, or set model.task"
        )
        yield Problem((), message, True)


def evaluates(run: RunConfig, action: Action) -> Iterator[Problem]:
    """Check that the tasks can evaluate a model for its task."""
    if run.is_broken("eval") or not run.has_valid_task:
        return
    options = action.options.over(run.eval) if run.eval is not None else EvalSection()
    local_labels = [task.label for task in options.local_tasks]
    if local_labels and (not options.tasks or set(local_labels) & set(options.tasks)):
        for task in options.local_tasks:
            models = local_tasks.LOCAL_KINDS[task.type].models
            runs = not options.tasks or task.label in options.tasks
            if runs and run.task not in models and _has_task(run):
                task_names = ", ".join(repr(model_task.value) for model_task in models)
                message = (
                    f"local_tasks evaluate models for {task_names} with the type {task.type}, and "
                    f"the model is for {run.task.value!r}: set model.task, or omit the action "
                    f"{action.name}"
                )
                yield Problem((), message, True)
    elif run.task not in (TaskType.CAUSAL_LM, TaskType.AUTO_BIND):
        message = (
            f"lm-evaluation-harness needs a causal language model, and the model is for "
            f"{run.task.value!r}: omit the action {action.name}, or set eval.local_tasks"
        )
        yield Problem((), message, True)


def _has_task(run: RunConfig) -> bool:
    """Return whether the file determines the task of the model, which is otherwise a default."""
    return run.trainer is not None or (run.model is not None and run.model.task is not None)


# Tasks of an evaluation.


def evaluation_tasks(run: RunConfig) -> Iterator[Problem]:
    """Check the tasks of the section `eval`."""
    if run.eval is not None:
        run_here = any(a.name == "eval" and not a.options.tasks for a in run.actions)
        yield from _tasks(run, run.eval, ("eval", "tasks"), run_here)


def benchmarks(run: RunConfig) -> Iterator[Problem]:
    """Check the tasks of `trainer.benchmarks`, and that the model can generate text for them."""
    trainer = run.trainer
    if trainer is None or run.eval is None:
        return
    local_labels = {task.label for task in run.eval.local_tasks}
    local = bool(trainer.benchmarks) and local_labels.issuperset(trainer.benchmarks)
    for option in ("generation_interval", "benchmark_interval"):
        set_here = getattr(trainer, option) is not None
        possible = run.task in GENERATING or (local and option == "benchmark_interval")
        if set_here and not possible:
            message = f"the model is for {run.task.value!r} and generates no text: omit the key"
            if option == "benchmark_interval":
                message += ", or name tasks of eval.local_tasks in benchmarks"
            yield Problem(("trainer", option), message, True)
    options = trainer.benchmark_options
    path: ValuePath = ("trainer", "benchmark_options")
    yield from validate_values(EvalOptions, options, path, partial=True)[1]
    if "tasks" in options:
        yield Problem((*path, "tasks"), "trainer.benchmarks names the tasks: omit the key", True)
    named = run.eval.model_copy(update={"tasks": trainer.benchmarks})
    yield from _tasks(run, named, ("trainer", "benchmarks"), run.will("train"))


def engine_of_training(run: RunConfig) -> Iterator[Problem]:
    """Check that the keys of `training_engine` agree with those of `esurge`."""
    if run.is_broken("training_engine") or run.is_broken("esurge"):
        return
    try:
        run.engine_of_training()
    except ValidationError as error:
        yield Problem(("training_engine",), f"with the section esurge: {explain_error(error)}")


def action_tasks(run: RunConfig, action: Action) -> Iterator[Problem]:
    """Check that an `eval` action has tasks, and that they exist."""
    if run.eval is None:
        return
    merged = action.options.over(run.eval)
    try:
        local_tasks.select_tasks(merged.local_tasks, merged.tasks)
    except ConfigError as error:
        yield Problem((), str(error), True)
        return
    if not merged.tasks and not merged.local_tasks:
        names = ", ".join(heldout_tasks.HELDOUT_TASKS)
        yield Problem((), f"no tasks are given; tasks of this package: {names}", True)
    elif action.options.tasks:
        yield from _tasks(run, merged, ("tasks",), True)


def _tasks(
    run: RunConfig, options: EvalSection, path: ValuePath, run_here: bool
) -> Iterator[Problem]:
    reported = False
    local_labels = [local.label for local in options.local_tasks]
    for i, task in enumerate(options.tasks):
        if task in local_labels:
            continue
        if local_labels and did_you_mean(task, local_labels) and not options.include_path:
            message = f"unknown task {task!r}{did_you_mean(task, local_labels)}"
            yield Problem((*path, i), message)
        elif task in heldout_tasks.HELDOUT_TASKS:
            if run_here and not run.is_broken("mixture") and not run.has_held_out and not reported:
                reported = True
                message = (
                    f"{task} needs held-out texts: set mixture.eval_fraction or "
                    "mixture.eval_informs"
                )
                yield Problem((*path, i), message)
        elif not options.include_path and _resembles_heldout_task(task):
            # Other names are looked up when lm-eval is imported, before training.
            message = (
                f"unknown task {task!r}{did_you_mean(task.lower(), heldout_tasks.HELDOUT_TASKS)}"
            )
            yield Problem((*path, i), message)


def _resembles_heldout_task(task: str) -> bool:
    close_matches = difflib.get_close_matches(
        task.lower(), heldout_tasks.HELDOUT_TASKS, n=1, cutoff=0.85
    )
    return task.lower().startswith("heldout") or bool(close_matches)
