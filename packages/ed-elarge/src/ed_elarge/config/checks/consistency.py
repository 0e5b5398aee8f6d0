"""Checks that need several keys, and often several sections. They do not depend on the machine.

Each function receives the whole run and yields problems whose paths start at the sections. A
section that failed validation is None: its problems are already reported. `ed_elarge.config.table`
assigns the checks to sections.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from ed_data.checks import without_tokens
from ed_infra.config.fields import FIELD_ALIASES, FIELDS, canonical_field
from ed_infra.config.fields import normalize as normalize_field
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError, did_you_mean
from ed_infra.sharding.axes import AXIS_NAMES

from ed_elarge import heldout_tasks
from ed_elarge.config.checks import architectures
from ed_elarge.config.run_config import Action, RunConfig
from ed_elarge.config.sections import EvalSection, SetsConfig
from ed_elarge.errors import KeyPath, Problem

# The model.


def model_config(run: RunConfig) -> Iterator[Problem]:
    """Check `model.config`: keys of its architecture, and execution fields."""
    model = run.model
    if model is None or model.config is None:
        return
    here = ("model", "config")
    problems = architectures.check(model.config, {*FIELDS, *FIELD_ALIASES}, here)
    yield from problems
    yield from _execution_fields(model.config, here)
    size = model.config.get("vocab_size")
    train = model.tokenizer_section.train
    if train is not None and size is not None and not problems:
        wanted = train.vocab_size
        if size < wanted:
            message = (
                f"{size} is less than the {wanted} of tokenizer.train: raise it, or leave it out"
            )
            yield Problem((*here, "vocab_size"), message)


def tokenizer(run: RunConfig) -> Iterator[Problem]:
    """The tokenizer is the model's, and has texts to be trained on."""
    model, mixture = run.model, run.mixture
    if model is None:
        return
    if model.tokenizer_section.train is not None and "mixture" not in run.written:
        message = "a tokenizer is trained on the texts of the section 'mixture', which is missing"
        yield Problem(("model", "tokenizer", "train"), message, True)
    other = mixture.tokenization.tokenizer if mixture is not None else None
    if other is not None and other not in (
        model.tokenizer_section.name_or_path,
        model.name_or_path,
    ):
        yield Problem(
            ("mixture", "tokenization", "tokenizer"),
            f"{other!r} is not the model's tokenizer, and its ids would mean nothing to the "
            "model: leave it out, or set model.tokenizer",
        )


# What other sections set in the model's configuration.


def base_config(run: RunConfig) -> Iterator[Problem]:
    """`base_config`: known keys, values of the right kind, no second opinion."""
    section = run.base_config
    if section is None:
        return
    here = ("base_config", "values")
    yield from _execution_fields(section.values, here)
    config = run.known_model or {}
    model_type = config.get("model_type")
    known = architectures.keys(model_type) | set(config)
    values = {str(key): value for key, value in section.values.items()}
    wrong = architectures.check_values(values, str(model_type))
    for key in values:
        if canonical_field(key) not in FIELDS and key not in known:
            hint = did_you_mean(key, [*FIELDS, *FIELD_ALIASES, *known])
            yield Problem((*here, key), f"unknown key {key!r}{hint}", True)
        elif key in wrong:
            yield Problem((*here, key), wrong[key])
    for operation, settings in section.operation_configs.items():
        path = ("base_config", "operation_configs", operation)
        wrong = list(_execution_field("operation_configs", {operation: {}}, path))
        yield from (problem._replace(on_key=True) for problem in wrong)
        for key, value in settings.items() if not wrong else ():
            yield from _execution_field(
                "operation_configs", {operation: {key: value}}, (*path, key)
            )


def weights_are_quantized_by_their_section(run: RunConfig) -> Iterator[Problem]:
    """Refuse fields of the configuration that quantize nothing: the section `quantization` does."""
    written: list[tuple[KeyPath, Mapping[str, Any] | None]] = [
        (("base_config", "values"), run.base_config.values if run.base_config else None),
        (("model", "config"), run.model.config if run.model else None),
    ]
    for here, values in written:
        for key, value in (values or {}).items():
            if canonical_field(key) in ("bits", "quantization_config") and value is not None:
                message = (
                    f"{key} quantizes no weights here: write quantization: {{model: "
                    "{quantization_method: nf4}}, and remove this key"
                )
                yield Problem((*here, key), message, True)


def one_opinion(run: RunConfig) -> Iterator[Problem]:
    """A field of the model's configuration that two sections set must have one value."""
    first: dict[str, tuple[KeyPath, Any]] = {}
    for name, section in run.sections.items():
        if not isinstance(section, SetsConfig):
            continue
        for field, (path, value) in section.config_fields().items():
            other_path, other = first.setdefault(field, ((name, *path), value))
            if other_path != (name, *path) and _plain(other) != _plain(value):
                message = f"differs from {'.'.join(map(str, other_path))}: keep one of them"
                yield Problem((name, *path), message)


def axes(run: RunConfig) -> Iterator[Problem]:
    """Names of mesh axes are names that something is split over."""
    if run.sharding is None or run.base_config is None:
        return
    fields = run.config_fields()
    names_path, names = fields.get("sharding_axis_names", ((), AXIS_NAMES))
    if not isinstance(names, (list, tuple)):
        return  # told by another check
    own = {field: value for field, (_, value) in fields.items()}
    config = (run.model.config if run.model is not None else None) or {}
    placed = own.get("partition_axis") or config.get("partition_axis")
    known = set(AXIS_NAMES) | _words(placed)
    unknown = [i for i, name in enumerate(names) if name not in known]
    for i in unknown:
        name = names[i]
        yield Problem(
            (*names_path, i),
            f"unknown mesh axis {name!r}{did_you_mean(str(name), known)}: nothing is split "
            "over it unless base_config.values.partition_axis says what",
        )
    for field in ("sequence_axis_name", "kv_cache_sharding_sequence_axis_name"):
        path, value = fields.get(field, ((), None))
        for name in _words(value) if not unknown else ():
            if name not in names:
                listing = f"{did_you_mean(str(name), names)} (axes: {', '.join(map(str, names))})"
                yield Problem(path, f"{name!r} is no axis of the mesh{listing}")


def _words(value: Any) -> set[str]:
    """Every name in a mapping of names and lists of names."""
    if isinstance(value, str):
        return {value}
    if isinstance(value, Mapping):
        value = list(value.values())
    return (
        {w for part in value for w in _words(part)} if isinstance(value, (list, tuple)) else set()
    )


def _execution_fields(values: Mapping[str, Any], path: KeyPath) -> Iterator[Problem]:
    first: dict[str, str] = {}
    for key, value in values.items():
        name = canonical_field(key) if isinstance(key, str) else key
        if name not in FIELDS:
            continue
        if name in first:
            message = f"{first[name]!r} and {key!r} are two names of one field: keep one"
            yield Problem((*path, key), message, True)
        first[name] = key
        yield from _execution_field(name, value, (*path, key))


def _execution_field(name: str, value: Any, path: KeyPath) -> Iterator[Problem]:
    try:
        normalize_field(name, value)
    except ConfigError as error:
        yield Problem(path, str(error))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (tuple, list)) else value


# Data and training.


def rows_of_text(run: RunConfig) -> Iterator[Problem]:
    """A method that learns from batches of tokens is given no images."""
    if run.mixture is None or run.trainer is None or run.takes_prompts:
        return
    for path, message in without_tokens(run.mixture):
        yield Problem(("mixture", *path), message)


def lengths(run: RunConfig) -> Iterator[Problem]:
    """There is a length of a sequence, one only, and the model has so many positions."""
    trainer, mixture = run.trainer, run.mixture
    if mixture is None or run.is_broken("trainer"):
        return
    if run.takes_prompts:
        if mixture.pack_tokens:
            message = f"{run.method} is given prompts, which are not packed: leave it out"
            yield Problem(("mixture", "pack_tokens"), message)
        return
    length, source = run.sequence_length
    if length is None:
        if trainer is not None:
            key = "pack_seq_length" if mixture.pack_tokens else "pack_tokens"
            yield Problem(
                ("mixture", key) if key in run.written["mixture"] else ("mixture",),
                "the length of a sequence is not given: set mixture.pack_seq_length (with "
                "pack_tokens: true), trainer.max_length or mixture.tokenization.max_length",
                True,
            )
        return
    of_trainer = trainer.max_length if trainer is not None else None
    of_texts = mixture.tokenization.max_length
    if of_trainer is not None and of_trainer != length:
        yield Problem(
            ("trainer", "max_length"),
            f"{of_trainer} differs from {source} ({length}), which sets the length of a "
            "sequence when packing: keep one of them",
        )
    if of_texts is not None and of_texts > length:
        yield Problem(
            ("mixture", "tokenization", "max_length"),
            f"{of_texts} is more than {source} ({length}): a text cannot be longer than a "
            "sequence; lower it, or leave it out",
        )
    limit = _positions(run)
    if limit is not None and length > limit:
        yield Problem(
            tuple(source.split(".")),
            f"{length} is more than the model's max_position_embeddings ({limit})",
        )


def _positions(run: RunConfig) -> int | None:
    """The model's `max_position_embeddings`, where it can be known."""
    values = run.base_config.values if run.base_config is not None else {}
    config = {**(run.known_model or {}), **values}
    default = architectures.default(config.get("model_type"), "max_position_embeddings")
    limit = config.get("max_position_embeddings", default)
    return limit if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0 else None


# What learns.


def one_says_what_learns(run: RunConfig) -> Iterator[Problem]:
    """Adapters and rules over parameters are two answers to one question."""
    if run.lora is not None and run.trainer is not None and run.trainer.trainable_rules:
        yield Problem(
            ("trainer", "trainable_rules"),
            "with the section lora the adapters alone learn: leave trainable_rules out, or the "
            "section",
        )


def a_base_does_not_move(run: RunConfig) -> Iterator[Problem]:
    """A reference that is the base under adapters cannot follow the learner."""
    if run.adapters is not None and getattr(run.trainer, "sync_ref_model", False):
        yield Problem(
            ("trainer", "sync_ref_model"),
            "the reference of a model with adapters is the base under them, which stays: leave "
            "sync_ref_model out, or train without the sections lora and quantization.model",
        )


def other_models(run: RunConfig) -> Iterator[Problem]:
    """The models beside the learner are those that the method reads."""
    if run.trainer is None:
        return
    entry = run.method_entry
    reads = [*entry.needs, *entry.may_read]
    for name in ("reference", "teacher", "reward"):
        section = f"{name}_model"
        if section in run.written and name not in reads:
            listing = ", ".join(f"{other}_model" for other in reads) or "no other model"
            message = f"{run.method} does not read it (it reads {listing}): leave it out"
            yield Problem((section,), message, True)
        if name in entry.needs and section not in run.written:
            message = f"{run.method} needs the section {section!r}: {section}: {{name_or_path: …}}"
            yield Problem(("trainer", "trainer_type"), message)


def is_a_language_model(run: RunConfig, action: Action) -> Iterator[Problem]:
    """Whatever generates needs a model that does."""
    task = run.method_entry.task
    if task != TaskType.CAUSAL_LM:
        message = (
            f"{run.method} trains a model for {task.value!r}, which generates nothing: leave the "
            f"action {action.name} out"
        )
        yield Problem((), message, True)


def quantized_weights_do_not_learn(run: RunConfig) -> Iterator[Problem]:
    """Of a quantized model adapters learn, and nothing else: the weights must have been trained."""
    trainer, model = run.trainer, run.model
    if run.has_frozen_weights and model is not None and model.config is not None:
        yield Problem(
            ("quantization", "model"),
            "the model is new, and its random weights could not learn any more: begin with one "
            "that was trained (model.name_or_path), or set simulate: true to learn with rounded "
            "weights",
        )
    if run.has_frozen_weights and trainer is not None and trainer.trainable_rules:
        yield Problem(
            ("trainer", "trainable_rules"),
            "with quantization.model the adapters of the section lora learn, and nothing else: "
            "leave trainable_rules out, or the quantization",
        )


# Tasks of an evaluation.


def tasks_of_section(run: RunConfig) -> Iterator[Problem]:
    """The tasks that `eval` names."""
    if run.eval is not None:
        run_here = any(a.name == "eval" and not a.options.tasks for a in run.actions)
        yield from _tasks(run, run.eval, ("eval", "tasks"), run_here)


def benchmarks(run: RunConfig) -> Iterator[Problem]:
    """The tasks of `trainer.benchmarks`, and that the model writes what is asked for."""
    trainer = run.trainer
    if trainer is None or run.eval is None:
        return
    task = run.method_entry.task
    for option in ("generation_interval", "benchmark_interval"):
        if task != TaskType.CAUSAL_LM and getattr(trainer, option) is not None:
            message = f"{run.method} trains a model for {task.value!r}, which generates nothing"
            yield Problem(("trainer", option), message, True)
    named = run.eval.model_copy(update={"tasks": trainer.benchmarks})
    yield from _tasks(run, named, ("trainer", "benchmarks"), run.will("train"))


def tasks_of_action(run: RunConfig, action: Action) -> Iterator[Problem]:
    """The tasks that an `eval` action names; it must have some. Paths start at its parameters."""
    if run.eval is None:
        return
    merged = action.options.over(run.eval)
    if not merged.tasks:
        names = ", ".join(heldout_tasks.NAMES)
        yield Problem((), f"no tasks are given; those of this package: {names}", True)
    elif action.options.tasks:
        yield from _tasks(run, merged, ("tasks",), True)


def _tasks(
    run: RunConfig, options: EvalSection, path: KeyPath, run_here: bool
) -> Iterator[Problem]:
    told = False
    for i, task in enumerate(options.tasks):
        if task in heldout_tasks.NAMES:
            if run_here and not run.is_broken("mixture") and not run.has_held_out and not told:
                told = True
                message = (
                    f"{task} needs held-out texts: set mixture.eval_fraction or "
                    "mixture.eval_informs"
                )
                yield Problem((*path, i), message)
        elif not options.include_path and _means_a_local_task(task):
            # lm-eval's own names are looked up before training: that takes importing lm-eval
            message = f"unknown task {task!r}{did_you_mean(task.lower(), heldout_tasks.NAMES)}"
            yield Problem((*path, i), message)


def _means_a_local_task(task: str) -> bool:
    near = difflib.get_close_matches(task.lower(), heldout_tasks.NAMES, n=1, cutoff=0.85)
    return task.lower().startswith("heldout") or bool(near)
