"""Keys that another key, or a missing one, makes idle: they are warned of, with their line.

Each function looks at one section (or at the parameters of one action) and yields the keys that do
nothing, and why. Only keys that the user set to something else than their default are told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pydantic
from ed_data import checks as data_checks
from ed_data.config import Mixture
from ed_esurge.config import EngineConfig
from ed_infra.config.fields import FIELDS, WITHOUT_EFFECT, canonical_field
from ed_trainers.arguments import TrainingArguments, idle_options

from ed_elarge.config.action_options import GenerateOptions
from ed_elarge.config.adaptation import QuantizationSection
from ed_elarge.config.run_config import RunConfig
from ed_elarge.config.sections import EvalSection, ModelSection
from ed_elarge.errors import KeyPath, Problem

#: `(keys, why)`: keys divided by spaces, and inside a key by dots; or one key as a path.
Idle = Iterable[tuple[str | KeyPath, str]]

_GREEDY = "temperature 0 always takes the likeliest token"


def model(options: ModelSection, run: RunConfig) -> Idle:
    if options.config is not None and options.tokenizer_section.train is not None:
        why = "model and tokenizer are made by this run, and nothing is loaded"
        yield "extra_kwargs.trust_remote_code extra_kwargs.revision", why


def mixture(options: Mixture, run: RunConfig) -> Idle:
    for path, message in data_checks.idle_options(options, run.schema):
        yield path, message.partition("no effect: ")[2]


def trainer(options: TrainingArguments, run: RunConfig) -> Idle:
    if run.mixture is not None and not run.has_held_out:
        why = "the mixture holds no texts out: set mixture.eval_fraction or mixture.eval_informs"
        yield "evaluation_steps eval_batch_size", why
    yield from idle_options(options)


def engine(options: EngineConfig, run: RunConfig) -> Idle:
    if options.strict_context:
        keys = "auto_truncate_prompt truncate_mode auto_cap_new_tokens"
        yield keys, "strict_context refuses whatever does not fit"
    elif not options.auto_truncate_prompt:
        keys = "truncate_mode prefer_preserve_prompt"
        yield keys, "auto_truncate_prompt is false: prompts are not cut"
    if options.num_pages is not None:
        yield "hbm_utilization cpu_cache_gib", "num_pages says how large the pool is"


def quantization(options: QuantizationSection, run: RunConfig) -> Idle:
    if options.model is not None and not options.apply_quantization:
        yield "model", "apply_quantization is false"
    if options.platform not in (None, "jax"):
        yield "platform", "plain XLA computes the products of quantized weights"


def evaluation(options: EvalSection, run: RunConfig) -> Idle:
    if options.temperature == 0:
        yield "top_p", _GREEDY
    if not options.apply_chat_template:
        yield "fewshot_as_multiturn", "examples are turns of a chat with apply_chat_template only"


def generation(options: GenerateOptions, run: RunConfig) -> Idle:
    if options.temperature == 0:
        yield "top_k top_p seed", _GREEDY


def warnings(
    options: pydantic.BaseModel, look: Callable[[Any, RunConfig], Idle] | None, run: RunConfig
) -> Iterator[Problem]:
    """The idle keys of one section or action; paths start there."""
    told = set[KeyPath]()
    for keys, why in look(options, run) if look is not None else ():
        paths = [keys] if isinstance(keys, tuple) else [tuple(k.split(".")) for k in keys.split()]
        for path in paths:
            if path not in told and _is_set(options, path):
                told.add(path)
                yield _warning(path, why)


def _is_set(options: pydantic.BaseModel, path: KeyPath) -> bool:
    """Whether a key has another value than its default."""
    name, *rest = path
    value = getattr(options, name)
    if isinstance(value, pydantic.BaseModel) and rest:
        return _is_set(value, tuple(rest))
    return bool(rest) or value != type(options).model_fields[name].get_default(
        call_default_factory=True
    )


def without_effect(run: RunConfig) -> Iterator[Problem]:
    """Fields of the model's configuration that nothing reads; paths start at the sections."""
    config = (run.model.config if run.model is not None else None) or {}
    fields = {canonical_field(k): (("model", "config", k), v) for k, v in config.items()}
    for name, (path, value) in (fields | run.config_fields()).items():
        if name in WITHOUT_EFFECT and value != FIELDS[name].default:
            yield _warning(path, "nothing reads it in this version")


def _warning(path: KeyPath, why: str) -> Problem:
    return Problem(path, f"has no effect: {why}", True)
