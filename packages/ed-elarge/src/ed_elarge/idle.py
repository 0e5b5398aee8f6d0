"""Keys that another key, or a missing one, makes idle: they are warned of, with their line.

One row for each reason: the keys, when they do nothing, and why. Only keys that the user wrote are
looked at. The options of trainers say the same of themselves (`ed_trainers.arguments`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pydantic
from ed_infra.fields import FIELDS, WITHOUT_EFFECT, canonical_field
from ed_trainers import arguments

from ed_elarge.errors import KeyPath, Problem
from ed_elarge.run_config import RunConfig

#: (section, keys, whether they are idle, why).
Row = tuple[str, str, Callable[[Any, RunConfig], bool], str]

_SECTIONS: tuple[Row, ...] = (
    (
        "model",
        "extra_kwargs.trust_remote_code extra_kwargs.revision",
        lambda model, run: model.config is not None and not isinstance(model.tokenizer, str),
        "model and tokenizer are made by this run, and nothing is loaded",
    ),
    (
        "mixture",
        "pack_seq_length pack_eos_token_id pack_strategy pack_shuffle pack_shuffle_buffer_factor",
        lambda mixture, run: not mixture.pack_tokens,
        "rows are packed with pack_tokens: true only",
    ),
    (
        "mixture",
        "pack_shuffle_buffer_factor",
        lambda mixture, run: mixture.pack_tokens and not mixture.pack_shuffle,
        "pack_shuffle is false",
    ),
    (
        "mixture",
        "stop_strategy",
        lambda mixture, run: mixture.mixture_weights is None,
        "without mixture_weights an epoch holds each document once",
    ),
    (
        "mixture",
        "mixture_block_size",
        lambda mixture, run: not mixture.block_mixture,
        "block_mixture is false",
    ),
    (
        "mixture",
        "text_target_field tokenization.output_field",
        lambda mixture, run: mixture.save is None,
        "data that is written has this field, and mixture.save is not set",
    ),
    (
        "trainer",
        "evaluation_steps eval_batch_size",
        lambda trainer, run: run.mixture is not None and not run.has_held_out,
        "the mixture holds no texts out: set mixture.eval_fraction or mixture.eval_informs",
    ),
    (
        "esurge",
        "auto_truncate_prompt truncate_mode auto_cap_new_tokens",
        lambda esurge, run: esurge.strict_context,
        "strict_context refuses whatever does not fit",
    ),
    (
        "esurge",
        "truncate_mode",
        lambda esurge, run: not esurge.strict_context and not esurge.auto_truncate_prompt,
        "auto_truncate_prompt is false: prompts are not cut",
    ),
    (
        "esurge",
        "hbm_utilization cpu_cache_gib",
        lambda esurge, run: esurge.num_pages is not None,
        "num_pages says how large the pool is",
    ),
    (
        "eval",
        "top_p",
        lambda options, run: options.temperature == 0,
        "temperature 0 always takes the likeliest token",
    ),
    (
        "eval",
        "fewshot_as_multiturn",
        lambda options, run: not options.apply_chat_template,
        "examples become turns of a chat with apply_chat_template only",
    ),
)

_ACTIONS: tuple[Row, ...] = (
    (
        "generate",
        "top_k top_p seed",
        lambda options, run: options.temperature == 0,
        "temperature 0 always takes the likeliest token",
    ),
)


def warnings_of_sections(run: RunConfig) -> Iterator[Problem]:
    """The idle keys of all sections; paths start at the sections."""
    for name, section in run.sections.items():
        for path, why in _idle(section, name, _SECTIONS, run):
            yield _warning((name, *path), why)
    idle_options = getattr(arguments, "idle_options", None)
    if run.trainer is not None and idle_options is not None:
        for key, why in dict(idle_options(run.trainer)).items():
            yield _warning(("trainer", key), why)
    config = (run.model.config if run.model is not None else None) or {}
    written: dict[KeyPath, str] = {
        ("model", "config", key): name for key in config if (name := canonical_field(key)) in FIELDS
    }
    written |= {path: field for field, (path, _) in run.config_fields().items()}
    for path, field in written.items():
        if field in WITHOUT_EFFECT:
            yield _warning(path, "nothing reads it in this version")


def warnings_of_actions(run: RunConfig) -> Iterator[Problem]:
    """The idle parameters of actions; paths start at the top of the file."""
    for action in run.actions:
        for path, why in _idle(action.options, action.name, _ACTIONS, run):
            yield run.place_in(action, _warning(path, why))


def _idle(
    options: Any, name: str, rows: Sequence[Row], run: RunConfig
) -> Iterator[tuple[KeyPath, str]]:
    if options is None:
        return
    for section, keys, is_idle, why in rows:
        if section == name and is_idle(options, run):
            for key in keys.split():
                path = tuple(key.split("."))
                if _written(options, path):
                    yield path, why


def _written(options: pydantic.BaseModel, path: Sequence[str]) -> bool:
    """Whether the user gave the key at `path` a value."""
    name, *rest = path
    value = getattr(options, name)
    if name not in options.model_fields_set or value is None:
        return False
    return not rest or _written(value, rest)


def _warning(path: KeyPath, why: str) -> Problem:
    return Problem(path, f"has no effect: {why}", True)
