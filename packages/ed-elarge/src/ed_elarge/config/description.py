"""The description of a run that `print` and `--dry-run` show."""

from __future__ import annotations

import pkgutil
from typing import Any

from ed_infra.errors import EasyDeLError
from ed_trainers.options.online import OnlineArguments

from ed_elarge.config.config_source import config_fields
from ed_elarge.config.run_config import RunConfig
from ed_elarge.config.table import ACTIONS


def describe_training(run: RunConfig) -> str:
    """Describe the model, the data and the training, one per line, before anything is loaded."""
    lines = [_model(run), _data(run), _trainer(run), _completions(run)]
    return "\n".join(line for line in lines if line)


def describe_run_file(run: RunConfig) -> str:
    """Describe the model, the data, the training and each action, one per line."""
    lines = [describe_training(run)]
    for number, action in enumerate(run.actions, 1):
        options = action.options.model_dump(mode="json", exclude_unset=True)
        parameters = ", ".join(f"{key}={value}" for key, value in options.items())
        lines.append(
            f"{number}. {action.name}: {ACTIONS[action.name].doc}"
            + (f" ({parameters})" if parameters else "")
        )
    return "\n".join(line for line in lines if line)


def parameter_count(config: dict[str, Any], vocab_size: int | None) -> int | None:
    """Return the parameters of a decoder with gated MLPs, or None for other architectures."""
    fields = config_fields(str(config.get("model_type")))
    if fields is None:
        return None
    values: dict[str, Any] = {key: field.default for key, field in fields.items()} | config
    try:
        hidden, layers = int(values["hidden_size"]), int(values["num_hidden_layers"])
        heads, middle = int(values["num_attention_heads"]), int(values["intermediate_size"])
        groups = int(values["num_key_value_heads"] or heads)
        size = int(values["head_dim"] or hidden // heads)
        vocabulary = int(vocab_size or values["vocab_size"])
        copies = 1 if values["tie_word_embeddings"] else 2
    except (KeyError, TypeError, ValueError):
        return None
    attention = 2 * hidden * heads * size + 2 * hidden * groups * size
    return layers * (attention + 3 * hidden * middle + 2 * hidden) + hidden * (
        1 + copies * vocabulary
    )


def _model(run: RunConfig) -> str:
    model = run.model
    if model is None:
        return ""
    if model.config is None:
        return f"model: {model.name_or_path} ({run.loader.dtype})"
    trained = model.tokenizer_section.train
    count = parameter_count(model.config, trained.vocab_size if trained else None)
    size = f", {count / 1e6:.1f}M parameters" if count else ""
    if trained is not None:
        tokenizer = f"a new tokenizer of {trained.vocab_size} tokens"
    elif not run.has_text:
        tokenizer = "a new image processor"
    else:
        tokenizer = str(model.tokenizer_section.name_or_path)
    return f"model: a new {model.config['model_type']}{size} ({run.loader.dtype}), {tokenizer}"


def _data(run: RunConfig) -> str:
    if run.mixture is None:
        return ""
    count = len(run.mixture.informs)
    sources = f"{count} source{'s' if count != 1 else ''}"
    if run.takes_prompts:
        return f"data: {sources}, prompts"
    if not run.has_text:
        return f"data: {sources}, images"
    packed = "packed " if run.mixture.pack_tokens else ""
    length, key = run.sequence_length
    default = "" if key or length is None else f" (the default of {run.method})"
    return f"data: {sources}, {packed}sequences of {length} tokens{default}"


def _trainer(run: RunConfig) -> str:
    trainer = run.trainer
    if trainer is None:
        return ""
    steps = trainer.max_training_steps
    length = f"{steps} steps" if steps else f"{trainer.num_train_epochs} epochs"
    return (
        f"training: {run.method}, {length} of {trainer.sequences_per_step} sequences, "
        f"learning rate {trainer.learning_rate}, into {trainer.save_directory}"
    )


def _completions(run: RunConfig) -> str:
    """Return the numbers of prompts and completions of a step, which depend on `batch_unit`."""
    trainer = run.trainer
    if not isinstance(trainer, OnlineArguments):
        return ""
    rows, prompts = trainer.sequences_per_step, trainer.loader_batch_size
    steps = trainer.steps_per_generation
    counts = f"{_count(prompts / steps, 'prompt')} and {_count(rows, 'completion')}"
    text = f"batch: {counts} in a step"
    sampled = trainer.completions_per_generation
    if steps > 1 or sampled != rows:
        text += f" (of {_count(prompts, 'prompt')} and {_count(sampled, 'sampled completion')}"
        text += f" for {_count(steps, 'step')})"
    shards = _count_row_shards(run)
    if shards is None:
        text += ", divided over the devices of all hosts"
    else:
        per_device = _count_device_rows(rows, trainer.gradient_accumulation_steps, shards)
        share = prompts / steps * per_device / rows
        text += f", per device {_count(share, 'prompt')} and {_count(per_device, 'completion')}"
    unit = getattr(trainer, "batch_unit", None)
    if unit is None:
        return text
    return f"{text}; trainer.batch_unit: total_batch_size {trainer.total_batch_size} counts {unit}"


def _count(number: float, noun: str) -> str:
    return f"{number:g} {noun}{'' if number == 1 else 's'}"


def _count_row_shards(run: RunConfig) -> int | None:
    """Return the number of parts into which the mesh divides rows; None if it is unknown."""
    from ed_elarge.config.checks.machine import count_local_devices

    devices = count_local_devices(run.platform.backend if run.platform is not None else None)
    if devices is None:
        return None
    try:
        mesh = pkgutil.resolve_name("ed_elarge.plan.mesh:build_mesh")(run, devices)
    except EasyDeLError:  # a warning names a mesh that does not fit the machine
        return None
    return mesh.count // mesh.activation(("batch",), (mesh.count,))


def _count_device_rows(rows: int, microbatches: int, shards: int) -> int:
    """Return the number of rows that a device computes in a step, without padding."""
    rows_of_microbatch = rows // microbatches
    # Every device computes all rows of a microbatch that has fewer rows than the mesh has parts.
    count = rows_of_microbatch if rows_of_microbatch < shards else -(-rows_of_microbatch // shards)
    return count * microbatches
