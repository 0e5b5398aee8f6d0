"""Rungs of a ladder: smaller models of the same family, and their number of steps.

A rung has the size of a head of the large model, and fewer heads, layers and features. Every rung
uses the same data in the same order, with the same recipe. The number of its tokens is in
proportion to its parameters, so one curve of loss over compute contains all rungs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from ed_infra.errors import ConfigError

from ed_elarge.config.run_config import RunConfig

#: Widths that shrink with the hidden size.
WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
#: Fewest steps of a rung.
FEWEST_STEPS = 20
_MULTIPLE = 8
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads")
#: Keys of the trainer with which a rung neither evaluates in between, nor saves, nor reports.
_QUIET: Mapping[str, Any] = {
    "save_steps": None,
    "saves_per_epoch": None,
    "save_strategy": "no",
    "save_interval_minutes": None,
    "do_last_save": False,
    "save_best_k": None,
    "load_best_model_at_end": False,
    "evaluation_steps": None,
    "evals_per_epoch": None,
    "eval_on_start": False,
    "generation_interval": None,
    "benchmark_interval": None,
    "mirror_address": None,
    "memory_directory": None,
    "report_to": [],
    "use_tensorboard": False,
    "progress_bar_type": "none",
    "log_strategy": None,
    "log_steps": 1,
}


class DecoderConfig(Protocol):
    """The fields of a decoder's configuration that a ladder reads."""

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int


@dataclass(frozen=True)
class RungSize:
    """The size of a model of the ladder.

    Attributes:
        factor: parameters of the rung as a share of those of the large model, approximately.
        fields: changed fields of `model.config`.
    """

    factor: float
    fields: Mapping[str, int]


@dataclass(frozen=True)
class Rung:
    """A model of the ladder, and its best trial.

    Attributes:
        fields: changed fields of `model.config`; none for the large model.
        parameters: number of parameters.
        steps: number of updates.
        tokens: positions of all batches.
        flops: floating-point operations of the training.
        learning_rate: best learning rate of the trials.
        batch_size: sequences of a batch.
        loss: loss of the best trial.
        seconds: of all trials.
        trials: learning rate, batch size, seed, loss and seconds of each trial.
    """

    fields: Mapping[str, int]
    parameters: int
    steps: int
    tokens: int
    flops: float
    learning_rate: float = 0.0
    batch_size: int = 0
    loss: float = math.nan
    seconds: float = 0.0
    trials: tuple[Mapping[str, Any], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the rung as JSON values."""
        return asdict(self)


def check_run(run: RunConfig) -> None:
    """Check that smaller models of a run predict it.

    Raises:
        ConfigError: the run continues trained weights, or samples its own data.
    """
    if run.trainer is None or run.mixture is None or run.model is None:
        raise ConfigError("a ladder trains models: the run file needs model, mixture and trainer")
    if run.model.config is None:
        raise ConfigError(
            f"a ladder trains new models, and {run.model.name_or_path} has trained weights, which "
            "no smaller model continues: write model.config instead of model.name_or_path"
        )
    if run.method_entry.samples or run.method_entry.needs or run.adapters is not None:
        raise ConfigError(
            f"a ladder predicts the loss of a model with new weights, not of {run.method}"
            f"{' with adapters' if run.adapters is not None else ''}: use sft on texts"
        )


def scale_size(config: DecoderConfig, factor: float) -> RungSize:
    """Return the size of a model with about a share of the parameters of its layers.

    Width and depth shrink by the same factor.

    Args:
        config: configuration of the large model.
        factor: the share.

    Raises:
        ConfigError: the family has no such fields.
    """
    missing = [name for name in _NEEDED if not isinstance(getattr(config, name, None), int)]
    if missing:
        raise ConfigError(
            f"models of {config.model_type} cannot be scaled: the configuration has no "
            f"{', '.join(missing)}; write a decoder such as llama"
        )
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    hidden, share = config.hidden_size, factor ** (1 / 3)
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    new_heads = max(1, round(heads * share))
    fields = {
        "num_attention_heads": new_heads,
        "hidden_size": max(1, round(hidden * new_heads / heads)),
        "num_hidden_layers": max(1, round(layers * share)),
    }
    if isinstance(getattr(config, "head_dim", None), int):
        fields["head_dim"] = head_dim
    key_value_heads = getattr(config, "num_key_value_heads", None)
    if isinstance(key_value_heads, int):
        most = max(1, round(key_value_heads * new_heads / heads))
        fields["num_key_value_heads"] = max(n for n in range(1, most + 1) if new_heads % n == 0)
    for name in WIDTHS:
        width = getattr(config, name, None)
        if isinstance(width, int) and width > 0:
            scaled = width * fields["hidden_size"] / hidden
            fields[name] = max(_MULTIPLE, round(scaled / _MULTIPLE) * _MULTIPLE)
    return RungSize(factor, fields)


def list_sizes(config: DecoderConfig, count: int, ratio: float) -> list[RungSize]:
    """Return the distinct sizes of a ladder, smallest first.

    Args:
        config: configuration of the large model.
        count: largest number of rungs.
        ratio: factor between the parameters of two rungs, and of the last rung and the large model.
    """
    sizes: list[RungSize] = []
    large = scale_size(config, 1.0).fields
    for number in range(count, 0, -1):
        size = scale_size(config, ratio**-number)
        if size.fields != large and all(size.fields != other.fields for other in sizes):
            sizes.append(size)
    return sizes


def scale_run(
    value: Mapping[str, Any],
    run: RunConfig,
    *,
    fields: Mapping[str, int],
    share: float,
    changes: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the values of the run file of a trial.

    Args:
        value: the values of the large run's file.
        run: the large run.
        fields: changed fields of `model.config`.
        share: steps of the trial as a share of the steps of the large run.
        changes: keys of the trainer.
    """
    trainer, model = run.trainer, run.model
    assert trainer is not None, "`check_run` checks the section"
    assert model is not None, "`check_run` checks the section"
    assert model.config is not None, "`check_run` checks the section"
    settings = dict(trainer.scheduler_kwargs)
    for name in ("decay_steps", "num_decay_steps"):
        if settings.get(name):
            settings[name] = max(1, round(settings[name] * share))
    warmup = trainer.warmup_steps
    if warmup >= 1:
        warmup = max(1, round(warmup * share))
    keys = {
        **{name: item for name, item in _QUIET.items() if name in type(trainer).model_fields},
        "eval_strategy": "no" if trainer.eval_strategy == "no" else None,
        "scheduler_kwargs": settings,
        "warmup_steps": warmup,
        **changes,
    }
    scaled_trainer = {**value["trainer"], **keys}
    scaled_model = {**value["model"], "config": {**model.config, **fields}}
    return {**value, "trainer": scaled_trainer, "model": scaled_model, "actions": ["train"]}
