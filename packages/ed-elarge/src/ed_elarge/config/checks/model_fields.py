"""Checks of the model's configuration: `model`, `base_config`, `sharding`, `quantization`, `lora`.

Each function receives the whole run and yields problems whose paths start at the sections. A
section that failed validation is None: its problems are already reported. The checks do not depend
on the machine. `ed_elarge.config.table` assigns them to sections.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ed_infra.config.fields import FIELD_ALIASES, FIELDS, canonical_field
from ed_infra.config.fields import normalize_fields as normalize_field
from ed_infra.errors import ConfigError, did_you_mean
from ed_infra.sharding.axes import AXIS_NAMES
from ed_trainers.options.optimizers import WITH_WIDTHS

from ed_elarge.config import architectures
from ed_elarge.config.run_config import RunConfig
from ed_elarge.config.sections import SetsConfig
from ed_elarge.errors import Problem, ValuePath


def check_model_config(run: RunConfig) -> Iterator[Problem]:
    """Check `model.config`: keys of its architecture, and execution fields."""
    model = run.model
    if model is None or model.config is None:
        return
    config_path = ("model", "config")
    problems = architectures.check_fields(model.config, {*FIELDS, *FIELD_ALIASES}, config_path)
    yield from problems
    yield from _execution_fields(model.config, config_path)
    size = model.config.get("vocab_size")
    train = model.tokenizer_section.train
    if train is not None and size is not None and not problems and size < train.vocab_size:
        message = (
            f"{size} is less than tokenizer.train.vocab_size ({train.vocab_size}): raise it, or "
            "omit it"
        )
        yield Problem((*config_path, "vocab_size"), message)


def check_tokenizer_section(run: RunConfig) -> Iterator[Problem]:
    """Check that the tokenizer belongs to the model and has texts for its training."""
    model, mixture = run.model, run.mixture
    if model is None:
        return
    tokenizer_section = model.tokenizer_section
    is_missing = tokenizer_section.name_or_path is None and tokenizer_section.train is None
    if model.config is not None and is_missing and run.has_text and run.has_valid_task:
        message = (
            "no tokenizer is set, and a new model has none: set tokenizer: PATH or tokenizer: "
            "{train: {vocab_size: N}}"
        )
        yield Problem(("model", *_missing_tokenizer(run)), message, True)
    if tokenizer_section.train is not None and not run.has_text and run.has_valid_task:
        message = f"a model for {run.task.value!r} reads no text: omit the tokenizer"
        yield Problem(("model", "tokenizer", "train"), message, True)
    if model.tokenizer_section.train is not None and "mixture" not in run.written:
        message = "training a tokenizer needs the texts of the section 'mixture', which is missing"
        yield Problem(("model", "tokenizer", "train"), message, True)
    data_tokenizer = mixture.tokenization.tokenizer if mixture is not None else None
    if data_tokenizer is not None and data_tokenizer not in (
        model.tokenizer_section.name_or_path,
        model.name_or_path,
    ):
        yield Problem(
            ("mixture", "tokenization", "tokenizer"),
            f"{data_tokenizer!r} is not the model's tokenizer, so the model cannot read its token "
            "ids: omit "
            "the key, or set model.tokenizer",
        )


def check_parametrization(run: RunConfig) -> Iterator[Problem]:
    """Check that µP has learning rates for the optimizer, and that the model has full weights."""
    model, trainer = run.model, run.trainer
    if model is None or not model.has_widths:
        return
    for name, section in (("lora", run.adapters), ("quantization", run.weight_format)):
        if section is not None:
            message = f"a model with {name} has no µP: omit the key and base_widths, or {name}"
            yield Problem(("model", "parametrization"), message)
    if trainer is not None and trainer.optimizer not in WITH_WIDTHS:
        message = (
            f"mup has learning rates for {', '.join(WITH_WIDTHS)}, not for {trainer.optimizer}, "
            "whose updates have another size at each width: choose one of them, or omit "
            "parametrization and base_widths"
        )
        yield Problem(("model", "parametrization"), message)


def _missing_tokenizer(run: RunConfig) -> ValuePath:
    """Return the key that a user wrote without a tokenizer, or the configuration."""
    model_values = run.written.get("model") or {}
    if "tokenizer" not in model_values:
        return ("config",)
    inner = model_values["tokenizer"]
    return ("tokenizer", *(("train",) if isinstance(inner, Mapping) and "train" in inner else ()))


def end_of_text(run: RunConfig) -> Iterator[Problem]:
    """Check that the token between packed documents is in the vocabulary."""
    mixture, model = run.mixture, run.model
    if mixture is None or model is None or mixture.pack_eos_token_id is None:
        return
    train = model.tokenizer_section.train
    size = train.vocab_size if train is not None else (run.known_model or {}).get("vocab_size")
    if type(size) is int and not 0 <= mixture.pack_eos_token_id < size:
        yield Problem(
            ("mixture", "pack_eos_token_id"),
            f"{mixture.pack_eos_token_id} is not in the vocabulary of {size} tokens: use a token "
            "id below, or omit the key for the end token of the tokenizer",
        )


def base_config(run: RunConfig) -> Iterator[Problem]:
    """Check the keys and values of `base_config`."""
    section = run.base_config
    if section is None:
        return
    values_path = ("base_config", "values")
    yield from _execution_fields(section.values, values_path)
    config = run.known_model or {}
    model_type = config.get("model_type")
    known_keys = architectures.keys(model_type) | set(config)
    values = {str(key): value for key, value in section.values.items()}
    wrong = architectures.check_values(values, str(model_type))
    for key in values:
        if canonical_field(key) not in FIELDS and key not in known_keys:
            hint = did_you_mean(key, [*FIELDS, *FIELD_ALIASES, *known_keys])
            yield Problem((*values_path, key), f"unknown key {key!r}{hint}", True)
        elif key in wrong:
            yield Problem((*values_path, key), wrong[key])
    for operation, settings in section.operation_configs.items():
        path = ("base_config", "operation_configs", operation)
        unknown = list(_execution_field("operation_configs", {operation: {}}, path))
        yield from (problem._replace(on_key=True) for problem in unknown)
        for key, value in settings.items() if not unknown else ():
            yield from _execution_field(
                "operation_configs", {operation: {key: value}}, (*path, key)
            )


def quantization_fields(run: RunConfig) -> Iterator[Problem]:
    """Reject configuration fields for quantization: the section `quantization` replaces them."""
    sources: list[tuple[ValuePath, Mapping[str, Any] | None]] = [
        (("base_config", "values"), run.base_config.values if run.base_config else None),
        (("model", "config"), run.model.config if run.model else None),
    ]
    for path, values in sources:
        for key, value in (values or {}).items():
            if canonical_field(key) in ("bits", "quantization_config") and value is not None:
                message = (
                    f"{key} quantizes no weights here: write quantization: {{model: "
                    "{quantization_method: nf4}}, and remove this key"
                )
                yield Problem((*path, key), message, True)


def conflicting_fields(run: RunConfig) -> Iterator[Problem]:
    """Reject different values for one configuration field in two sections."""
    first: dict[str, tuple[ValuePath, Any]] = {}
    for name, section in run.sections.items():
        if not isinstance(section, SetsConfig):
            continue
        for field, (path, value) in section.config_fields().items():
            other_path, first_value = first.setdefault(field, ((name, *path), value))
            if other_path != (name, *path) and _as_list(first_value) != _as_list(value):
                message = f"differs from {'.'.join(map(str, other_path))}: keep one of them"
                yield Problem((name, *path), message)


def sharding_fields(run: RunConfig) -> Iterator[Problem]:
    """Check the values of `sharding` that are fields of the model's configuration."""
    if run.sharding is None:
        return
    for field, (path, value) in run.sharding.config_fields().items():
        if field in ("partition_axis", "sharding_rules"):
            yield from _execution_field(field, value, ("sharding", *path))


def mesh_axes(run: RunConfig) -> Iterator[Problem]:
    """Check that each mesh axis splits a dimension, and that named sequence axes exist."""
    if run.sharding is None or run.base_config is None:
        return
    fields = run.config_fields()
    names_path, names = fields.get("sharding_axis_names", ((), AXIS_NAMES))
    if not isinstance(names, (list, tuple)):
        return  # another check reports the type
    config_values = {field: value for field, (_, value) in fields.items()}
    config = (run.model.config if run.model is not None else None) or {}
    placed = config_values.get("partition_axis") or config.get("partition_axis")
    known_axes = set(AXIS_NAMES) | _strings(placed)
    if not all(isinstance(name, str) for name in names):
        return  # another check reports the types
    unknown = [i for i, name in enumerate(names) if name not in known_axes]
    for i in unknown:
        name = names[i]
        yield Problem(
            (*names_path, i),
            f"unknown mesh axis {name!r}{did_you_mean(str(name), known_axes)}: no dimension is "
            "split "
            "over it unless sharding.partition_axis assigns one",
        )
    for field in ("sequence_axis_name", "kv_cache_sharding_sequence_axis_name"):
        path, value = fields.get(field, ((), None))
        for name in _strings(value) if not unknown else ():
            if name not in names:
                listing = f"{did_you_mean(str(name), names)} (axes: {', '.join(map(str, names))})"
                yield Problem(path, f"the mesh has no axis {name!r}{listing}")


def mesh_sizes(run: RunConfig) -> Iterator[Problem]:
    """Check that the mesh has one size for each name, from whichever section they are."""
    if run.sharding is None or run.base_config is None:
        return
    config = (run.model.config if run.model is not None else None) or {}
    fields = {canonical_field(str(key)): (("model", "config", key), config[key]) for key in config}
    fields |= run.config_fields()
    names_path, names = fields.get("sharding_axis_names", (None, run.sharding.axis_names))
    if not isinstance(names, (list, tuple)):
        return  # another check reports the type
    sections = {
        "sharding_axis_dims": run.sharding.axis_dims,
        "sharding_dcn_axis_dims": run.sharding.dcn_axis_dims,
    }
    for field, default in sections.items():
        path, sizes = fields.get(field, (names_path, default))
        if path is None or not isinstance(sizes, (list, tuple)) or len(sizes) == len(names):
            continue
        yield Problem(
            path,
            f"{field} has {len(sizes)} sizes {list(sizes)}, and the mesh has {len(names)} axes "
            f"{list(names)}: set one size for each axis",
        )


def adapters_or_rules(run: RunConfig) -> Iterator[Problem]:
    """Reject `lora` together with rules that select trainable parameters."""
    for key in _list_rules(run) if run.lora is not None else ():
        yield Problem(
            ("trainer", key),
            f"with the section lora only the adapters are trained: omit {key}, or the section lora",
        )


def initial_adapters(run: RunConfig) -> Iterator[Problem]:
    """Reject initial values of adapters that decompose quantized weights."""
    if run.lora is not None and run.lora.decomposes_weights and run.weight_format is not None:
        start = run.lora.init_lora_weights
        yield Problem(
            ("lora", "init_lora_weights"),
            "loftq computes codes of the weights itself (lora.loftq_config): omit the quantization"
            if start == "loftq"
            else f"{start} decomposes the weights of the base, and quantization rounds them: omit "
            "init_lora_weights, or the quantization",
        )


def _list_rules(run: RunConfig) -> list[str]:
    """Return the keys of the trainer that select trained parameters."""
    keys = ("trainable_rules", "frozen_parameters")
    return [key for key in keys if run.trainer is not None and getattr(run.trainer, key)]


def frozen_weights(run: RunConfig) -> Iterator[Problem]:
    """Check that quantized weights were trained before, and that nothing tries to train them."""
    model = run.model
    if run.has_frozen_weights and model is not None and model.config is not None:
        yield Problem(
            ("quantization", "model"),
            "the model has randomly initialized weights, and quantized weights are not trained: "
            "start from a trained model (model.name_or_path), or set simulate: true to train with "
            "rounded weights",
        )
    section = run.quantization
    both = section is not None and section.model is not None and section.apply_quantization
    if both and run.trainer is not None and run.trainer.quantization_mode:
        yield Problem(
            ("trainer", "quantization_mode"),
            "quantization.model sets a format, too: omit one of the two. quantization_mode is "
            "quantization.model with simulate: true",
        )
    for key in _list_rules(run) if run.has_frozen_weights else ():
        yield Problem(
            ("trainer", key),
            f"with quantization.model only the adapters of the section lora are trained: omit {key}"
            ", or the quantization",
        )


def _execution_fields(values: Mapping[str, Any], path: ValuePath) -> Iterator[Problem]:
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


def _execution_field(name: str, value: object, path: ValuePath) -> Iterator[Problem]:
    try:
        normalize_field(name, value)
    except ConfigError as error:
        yield Problem(path, str(error))


def _strings(value: object) -> set[str]:
    """Return every string in nested mappings and lists."""
    if isinstance(value, str):
        return {value}
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        return set()
    return {string for part in value for string in _strings(part)}


def _as_list(value: object) -> Any:
    return list(value) if isinstance(value, (tuple, list)) else value
