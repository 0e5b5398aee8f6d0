"""Keys that another key, or a missing one, makes idle: they are warned of, with their line.

Each function looks at one section (or at the parameters of one action) and yields the keys that do
nothing, and why. Only keys that the user set to something else than their default are told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pydantic
from ed_data.config import Mixture
from ed_esurge.config import EngineConfig
from ed_infra.fields import FIELDS, WITHOUT_EFFECT, canonical_field
from ed_trainers import arguments
from ed_trainers.arguments import TrainingArguments

from ed_elarge.errors import KeyPath, Problem
from ed_elarge.run_config import RunConfig
from ed_elarge.sections import EvalSection, GenerateOptions, ModelSection

#: `(keys, why)`: keys divided by spaces, and inside a key by dots.
Idle = Iterable[tuple[str, str]]

_GREEDY = "temperature 0 always takes the likeliest token"


def model(options: ModelSection, run: RunConfig) -> Idle:
    if options.config is not None and not isinstance(options.tokenizer, str):
        why = "model and tokenizer are made by this run, and nothing is loaded"
        yield "extra_kwargs.trust_remote_code extra_kwargs.revision", why


def mixture(options: Mixture, run: RunConfig) -> Idle:
    if not options.pack_tokens:
        keys = "pack_seq_length pack_strategy pack_shuffle pack_shuffle_buffer_factor"
        yield keys, "rows are packed with pack_tokens: true only"
    elif not options.pack_shuffle:
        yield "pack_shuffle_buffer_factor", "pack_shuffle is false"
    if options.mixture_weights is None:
        yield "stop_strategy", "without mixture_weights an epoch holds each document once"
    if not options.block_mixture:
        yield "mixture_block_size", "block_mixture is false"
    if options.save is None:
        why = "it names a field of the data that is written, and mixture.save is not set"
        yield "text_target_field tokenization.output_field", why


def trainer(options: TrainingArguments, run: RunConfig) -> Idle:
    if run.mixture is not None and not run.has_held_out:
        why = "the mixture holds no texts out: set mixture.eval_fraction or mixture.eval_informs"
        yield "evaluation_steps eval_batch_size", why
    of_arguments = getattr(arguments, "idle_options", None)
    if of_arguments is not None:
        yield from dict(of_arguments(options)).items()


def engine(options: EngineConfig, run: RunConfig) -> Idle:
    if options.strict_context:
        keys = "auto_truncate_prompt truncate_mode auto_cap_new_tokens"
        yield keys, "strict_context refuses whatever does not fit"
    elif not options.auto_truncate_prompt:
        yield "truncate_mode", "auto_truncate_prompt is false: prompts are not cut"
    if options.num_pages is not None:
        yield "hbm_utilization cpu_cache_gib", "num_pages says how large the pool is"


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
    for keys, why in look(options, run) if look is not None else ():
        for key in keys.split():
            *holders, last = path = tuple(key.split("."))
            holder: Any = options
            for name in holders:
                holder = getattr(holder, name)
            if getattr(holder, last) != type(holder).model_fields[last].get_default():
                yield _warning(path, why)


def without_effect(run: RunConfig) -> Iterator[Problem]:
    """Fields of the model's configuration that nothing reads; paths start at the sections."""
    config = (run.model.config if run.model is not None else None) or {}
    fields = {canonical_field(k): (("model", "config", k), v) for k, v in config.items()}
    for name, (path, value) in (fields | run.config_fields()).items():
        if name in WITHOUT_EFFECT and value != FIELDS[name].default:
            yield _warning(path, "nothing reads it in this version")


def _warning(path: KeyPath, why: str) -> Problem:
    return Problem(path, f"has no effect: {why}", True)
