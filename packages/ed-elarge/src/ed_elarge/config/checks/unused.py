"""Keys without effect because of another key. The run warns about them with their line.

Each function receives one section, or the parameters of one action, and yields keys without effect
and the reason. Only keys that the user set to a value other than the default are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pydantic
from ed_data import checks as data_checks
from ed_data.config import Mixture
from ed_esurge.config import EngineConfig
from ed_infra.config.fields import canonical_field, find_remarks
from ed_infra.enums import TaskType
from ed_trainers.arguments import (
    ARGUMENTS,
    OWN_NAMES,
    ROLES,
    TrainingArguments,
    idle_options,
)

from ed_elarge.config.action_options import GenerateOptions
from ed_elarge.config.adaptation import QuantizationSection
from ed_elarge.config.run_config import RunConfig
from ed_elarge.config.sections import EvalSection, ModelSection
from ed_elarge.errors import Problem, ValuePath

#: `(keys, reason)`: keys separated by spaces, with dots inside a key; or one key as a path.
Unused = Iterable[tuple[str | ValuePath, str]]

_GREEDY = "temperature 0 always selects the likeliest token"


def find_unused_model(options: ModelSection, run: RunConfig) -> Unused:
    if options.config is not None and options.tokenizer_section.train is not None:
        reason = "this run creates the model and the tokenizer, and loads nothing"
        yield "extra_kwargs.trust_remote_code extra_kwargs.revision", reason
    if run.trainer is not None and options.task == TaskType.CAUSAL_LM not in run.tasks:
        yield "task", f"{run.method} trains a model for {run.tasks[0].value!r}"


def find_unused_mixture(options: Mixture, run: RunConfig) -> Unused:
    for path, message in data_checks.idle_options(options, run.schema):
        yield path, message.partition("no effect: ")[2]


def find_unused_trainer(options: TrainingArguments, run: RunConfig) -> Unused:
    if run.mixture is not None and not run.has_held_out:
        reason = "no texts are held out: set mixture.eval_fraction or mixture.eval_informs"
        yield "evaluation_steps evals_per_epoch eval_on_start eval_batch_size", reason
    saves = (options.save_steps, options.saves_per_epoch, options.save_best_k)
    if saves == (None, None, None) and options.save_strategy != "epoch":
        yield "save_total_limit", "save_steps is not set: the run saves one checkpoint, at its end"
    yield from idle_options(options)


def find_unused_engine(options: EngineConfig, run: RunConfig) -> Unused:
    if options.strict_context:
        keys = "auto_truncate_prompt truncate_mode auto_cap_new_tokens"
        yield keys, "strict_context rejects requests that do not fit"
    elif not options.auto_truncate_prompt:
        keys = "truncate_mode prefer_preserve_prompt"
        yield keys, "auto_truncate_prompt is false: prompts are not truncated"
    if options.num_pages is not None:
        yield "hbm_utilization cpu_cache_gib", "num_pages sets the size of the cache"


def find_unused_training_engine(options: EngineConfig, run: RunConfig) -> Unused:
    if run.trainer is None:
        yield " ".join(options.model_fields_set), "there is no section trainer"


def find_unused_quantization(options: QuantizationSection, run: RunConfig) -> Unused:
    if options.model is not None and not options.apply_quantization:
        yield "model", "apply_quantization is false"
    if options.platform not in (None, "jax"):
        yield "platform", "XLA computes the products of quantized weights on every platform"


#: Keys of the section `eval` that only lm-evaluation-harness reads.
_OF_HARNESS = (
    "include_path num_fewshot max_new_tokens temperature top_p cache_requests check_integrity "
    "write_out log_samples bootstrap_iters apply_chat_template system_instruction "
    "fewshot_as_multiturn gen_kwargs predict_only random_seed numpy_random_seed "
    "fewshot_random_seed confirm_run_unsafe_code"
)


def find_unused_evaluation(options: EvalSection, run: RunConfig) -> Unused:
    local_labels = {task.label for task in options.local_tasks}
    if local_labels and local_labels.issuperset(options.tasks):
        yield _OF_HARNESS, "only lm-evaluation-harness reads the key, and all tasks are local"
    if options.temperature == 0:
        yield "top_p", _GREEDY
    if not options.apply_chat_template:
        yield "fewshot_as_multiturn", "examples are chat turns only with apply_chat_template"


def find_unused_generation(options: GenerateOptions, run: RunConfig) -> Unused:
    if options.temperature == 0:
        yield "top_k top_p seed", _GREEDY


def list_unused_options(
    options: pydantic.BaseModel, find: Callable[[Any, RunConfig], Unused] | None, run: RunConfig
) -> Iterator[Problem]:
    """Yield a warning for each key without effect; paths start at the section or action."""
    reported = set[ValuePath]()
    for keys, reason in find(options, run) if find is not None else ():
        paths = [keys] if isinstance(keys, tuple) else [tuple(k.split(".")) for k in keys.split()]
        for path in paths:
            if path not in reported and _is_set(options, path):
                reported.add(path)
                yield _warning(path, reason)


def _is_set(options: pydantic.BaseModel, path: ValuePath) -> bool:
    """Return whether a key has a value other than its default."""
    name, *inner_path = path
    value = getattr(options, name)
    if isinstance(value, pydantic.BaseModel) and inner_path:
        return _is_set(value, tuple(inner_path))
    return bool(inner_path) or value != type(options).model_fields[name].get_default(
        call_default_factory=True
    )


def find_other_kinds(
    value: Mapping[str, Any], kind: str, classes: Mapping[str, type[pydantic.BaseModel]]
) -> dict[str, list[str]]:
    """Return key -> kinds that have the key, for the keys that the chosen kind lacks."""

    def has(cls: type[pydantic.BaseModel], key: str) -> bool:
        return key in cls.model_fields or key in getattr(cls, "ALIASES", {})

    lacking = (key for key in value if not has(classes[kind], key))
    kinds_by_key = {
        key: [name for name, cls in classes.items() if has(cls, key)] for key in lacking
    }
    return {key: names for key, names in kinds_by_key.items() if names}


def replaced_names(value: Mapping[str, Any], cls: type[pydantic.BaseModel]) -> dict[str, str]:
    """Return key -> the method's own name of its option, for keys that this name replaces."""
    aliases = getattr(cls, "ALIASES", {})
    return {
        name: own_name
        for own_name, name in OWN_NAMES.items()
        if own_name in value and name in value and aliases.get(own_name) == name
    }


def find_other_method_keys(run: RunConfig) -> Iterator[Problem]:
    """Yield the keys of the trainer that only other methods read."""
    trainer_values = run.written.get("trainer")
    if run.trainer is not None and isinstance(trainer_values, Mapping):
        for key, own_name in replaced_names(trainer_values, ARGUMENTS[run.method]).items():
            yield _warning(
                ("trainer", key), f"{own_name} sets this option of {run.method}: keep {own_name}"
            )
        for key, methods in find_other_kinds(trainer_values, run.method, ARGUMENTS).items():
            listed = ", ".join(methods)
            yield _warning(("trainer", key), f"{run.method} does not read the key ({listed} do)")


def find_unused_models(run: RunConfig) -> Iterator[Problem]:
    """Yield the models that the method does not read; in a run with actions they are errors."""
    if run.trainer is None or run.actions:
        return
    reads = (*run.method_entry.needs, *run.method_entry.may_read)
    for name, role in ROLES.items():
        if role.section in run.written and name not in reads:
            yield _warning((role.section,), f"{run.method} does not read the model")


def without_effect(run: RunConfig) -> Iterator[Problem]:
    """Yield configuration fields that no code reads; paths start at the sections."""
    config = (run.model.config if run.model is not None else None) or {}
    paths = {canonical_field(key): ("model", "config", key) for key in config}
    paths |= {name: path for name, (path, _) in run.config_fields().items()}
    for (name, *inner_path), _, remark in find_remarks(run.execution_fields()):
        if name in paths:
            yield Problem((*paths[name], *inner_path), remark, not inner_path)


def _warning(path: ValuePath, reason: str) -> Problem:
    return Problem(path, f"has no effect: {reason}", True)
