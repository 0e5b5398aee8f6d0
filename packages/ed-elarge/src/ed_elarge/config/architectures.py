"""Checks of `model.config`: keys, types and bounds of an architecture, without transformers.

`config_source` reads the fields of the architecture's Hugging Face class. A model type that an
installed package provides, but transformers does not know, is checked when the model is built.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import metadata
from typing import Any

from ed_infra.dtypes import canonical_dtype
from ed_infra.enums import ACTIVATION_NAMES
from ed_infra.errors import ConfigError, did_you_mean, unknown_name

from ed_elarge.config.config_source import ConfigField, config_fields, inner_types
from ed_elarge.errors import Problem, ValuePath

#: Keys of older `config.json` files that transformers still reads.
LEGACY_FIELDS = {
    "rope_theta": ConfigField(("number",), None),
    "rope_scaling": ConfigField(("mapping", "null"), None),
}

#: Ends of the names of sizes, and of activations.
_SIZES, _ACTIVATION = ("_size", "_dim"), ("_act", "_activation", "activation_function")
_COUNTS = (*_SIZES, "_length", "_layers", "_heads", "_positions")
#: Keys with few valid texts.
ALLOWED = {"ctc_loss_reduction": ("sum", "mean"), "feat_extract_norm": ("group", "layer")}

#: Name of a type -> the Python types of its values, and its description in messages.
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "integer": ((int,), "an integer"),
    "number": ((int, float), "a number"),
    "boolean": ((bool,), "true or false"),
    "string": ((str,), "text"),
    "mapping": ((dict,), "a mapping"),
    "list": ((list,), "a list"),
    "null": ((type(None),), "null"),
}


@functools.cache
def list_architectures() -> tuple[str, ...]:
    """Return every model type that an installed package provides."""
    return tuple(sorted({e.name for e in metadata.entry_points(group="easydel.models")}))


def keys(model_type: object) -> set[str]:
    """Return the keys of an architecture, or of all architectures if the model type is unknown."""
    fields = config_fields(str(model_type))
    field_sets = (
        [fields] if fields is not None else [config_fields(name) for name in list_architectures()]
    )
    return {key for fields in field_sets for key in fields or ()} | set(LEGACY_FIELDS)


def get_default(model_type: object, key: str) -> Any:
    """Return the default of an architecture's key, or None if it is unknown."""
    field = (config_fields(str(model_type)) or {}).get(key)
    return field.default if field is not None else None


def check_fields(
    config: Mapping[str, Any], execution_fields: Collection[str], path: ValuePath = ()
) -> list[Problem]:
    """Check a `model.config` mapping and the configurations inside it (`text_config`).

    Args:
        config: The mapping that the user wrote.
        execution_fields: Names of execution fields, which other functions check.
        path: The path of the mapping; the paths of problems start with it.
    """
    model_type = config.get("model_type")
    if model_type is None:
        for key in config:
            if did_you_mean(str(key).lower(), ["model_type"]):
                message = f"unknown key {key!r}; did you mean 'model_type'?"
                return [Problem((*path, key), message, on_key=True)]
        message = f"the key 'model_type' is missing (known: {', '.join(list_architectures())})"
        return [Problem((*path, "model_type"), message, on_key=True)]
    if model_type not in list_architectures():
        message = str(unknown_name("model type", model_type, list_architectures()))
        return [Problem((*path, "model_type"), message)]
    return _check_fields(config, str(model_type), execution_fields, path)


def _check_fields(
    config: Mapping[str, Any], model_type: str, execution_fields: Collection[str], path: ValuePath
) -> list[Problem]:
    fields = config_fields(model_type)
    if fields is None:
        return []
    architecture_fields = {
        k: v for k, v in config.items() if k != "model_type" and k not in execution_fields
    }
    wrong = check_values(architecture_fields, model_type)
    problems = [Problem((*path, key), message) for key, message in wrong.items()]
    for key, value in architecture_fields.items():
        if key not in fields and key not in LEGACY_FIELDS:
            hint = did_you_mean(str(key), [*fields, *LEGACY_FIELDS, *execution_fields])
            problems.append(Problem((*path, key), f"unknown key {key!r}{hint}", on_key=True))
        elif str(key).endswith("_config") and isinstance(value, Mapping):
            inner = value.get("model_type") or inner_types(model_type).get(key)
            problems += _check_fields(value, str(inner), (), (*path, key)) if inner else []
    return problems or [
        Problem((*path, key), message, on_key=key not in config)
        for key, message in _contradictions(lambda key: config.get(key, fields[key].default))
    ]


def check_values(values: Mapping[str, Any], model_type: str) -> dict[str, str]:
    """Check types and bounds of an architecture's values; unknown keys are skipped.

    Returns:
        Key -> message for each invalid value.
    """
    known_fields = {**(config_fields(model_type) or {}), **LEGACY_FIELDS}
    problems = {k: _wrong(k, v, known_fields[k]) for k, v in values.items() if k in known_fields}
    return {key: message for key, message in problems.items() if message}


def _wrong(key: str, value: object, field: ConfigField) -> str:
    """Return why a value is invalid, or an empty string."""
    if not any(_is(value, name) for name in field.types):
        names = [n for n in field.types if n != "integer" or "number" not in field.types]
        return f"must be {' or '.join(_TYPES[name][1] for name in names)}, got {value!r}"
    names = (*ACTIVATION_NAMES, field.default)
    if isinstance(value, str) and key.endswith(_ACTIVATION) and value not in names:
        return str(unknown_name(key, value, ACTIVATION_NAMES))
    if isinstance(value, str) and value not in ALLOWED.get(key, (value,)):
        return str(unknown_name(key, value, ALLOWED[key]))
    if isinstance(value, list) and _are_counts(field.default) and not _are_counts(value):
        return f"must be a list of integers of at least 1, got {value!r}"
    if value == [] and _are_counts([field.default]):
        return "must not be an empty list"
    if value is None and key.endswith(_SIZES) and _are_counts([field.default]):
        return f"must be an integer, got null: omit the key for the default, {field.default}"
    if isinstance(value, str) and key == "dtype":
        try:
            canonical_dtype(value)
        except ConfigError as error:
            return str(error)
    if key.endswith("_token_id"):
        ids = value if isinstance(value, list) else [value]
        if not all(i is None or (type(i) is int and 0 <= i < 2**31) for i in ids):
            return f"must be a token id, 0 or more, got {value!r}"
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        least, most, words = _bounds(key, field)
        if not least <= value <= most:
            return f"must be {words}, got {value!r}"
    return ""


def _are_counts(values: object) -> bool:
    return (
        isinstance(values, list | tuple)
        and bool(values)
        and all(type(v) is int and 0 < v < 2**31 for v in values)
    )


def _bounds(key: str, field: ConfigField) -> tuple[float, float, str]:
    """Return the smallest and the largest valid number, and their description.

    The default of the architecture is always valid.
    """
    if key.endswith("dropout"):
        return 0.0, math.nextafter(1.0, 0.0), "at least 0 and below 1"
    if key.endswith("_eps"):
        return math.nextafter(0.0, 1.0), 1.0, "above 0 and at most 1"
    if key == "initializer_range":
        return 0.0, 100.0, "between 0 and 100"
    default = field.default if isinstance(field.default, (int, float)) else 1
    if "integer" in field.types:
        counts = key.startswith(("num_", "max_position", "d_")) or key.endswith(_COUNTS)
        least = min(int(counts), int(default))
        return least, 2**31 - 1, f"between {least} and {2**31 - 1}"
    if default > 0:
        return math.nextafter(0.0, 1.0), 1e12, "above 0 and at most 1e12"
    return default, 1e12, f"between {default:g} and 1e12"


def _contradictions(value: Callable[[str], Any]) -> Iterator[tuple[str, str]]:
    """Yield sizes that contradict each other; architectures without these keys are skipped."""
    try:
        hidden, heads = value("hidden_size"), value("num_attention_heads")
        groups, head_dim = value("num_key_value_heads") or heads, value("head_dim")
    except KeyError:
        return
    if heads % groups:
        yield "num_key_value_heads", f"{groups} does not divide num_attention_heads ({heads})"
    elif head_dim is None and hidden % heads:
        message = (
            f"{heads} does not divide hidden_size ({hidden}): change one of them, or set head_dim"
        )
        yield "num_attention_heads", message


def _is(value: object, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _TYPES[name][0])
