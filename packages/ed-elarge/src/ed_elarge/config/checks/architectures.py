"""Which keys a Hugging Face model configuration has, known without importing transformers.

`architectures.json` is made from the configuration classes themselves by
`python -m tools.architectures`; a test makes it again and compares. A model type that is installed
as an `easydel.models` entry point but has no entry here is checked when it is built.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Collection, Mapping
from importlib import metadata, resources
from typing import Any

from ed_infra.dtypes import canonical_dtype
from ed_infra.errors import ConfigError, did_you_mean, unknown_name

#: Spellings of older `config.json` files, which transformers still reads.
LEGACY_KEYS: dict[str, dict[str, Any]] = {
    "rope_theta": {"types": ["number"]},
    "rope_scaling": {"types": ["mapping", "null"]},
}

#: Name of a type -> the Python types of its values, and the words for it.
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
def tables() -> dict[str, dict[str, dict[str, Any]]]:
    """Model type -> key -> `{"types": [...], "default": ...}`, with `"known"` for some names."""
    return json.loads(
        resources.files("ed_elarge.config.checks").joinpath("architectures.json").read_text()
    )


@functools.cache
def model_types() -> tuple[str, ...]:
    """Every model type that an installed package offers."""
    return tuple(sorted({e.name for e in metadata.entry_points(group="easydel.models")}))


def keys(model_type: object) -> set[str]:
    """The keys of an architecture; of every architecture, where the model type is not known."""
    table = tables().get(str(model_type))
    chosen = [table] if table is not None else tables().values()
    return {key for table in chosen for key in table} | set(LEGACY_KEYS)


def default(model_type: object, key: str) -> Any:
    """The value that an architecture has where its configuration is silent; None if unknown."""
    return tables().get(str(model_type), {}).get(key, {}).get("default")


def check(config: Mapping[str, Any], execution_fields: Collection[str]) -> dict[str, str]:
    """Check a `model.config` mapping.

    Args:
        config: what the user wrote.
        execution_fields: names that are ours, not the architecture's; checked elsewhere.

    Returns:
        Key -> what is wrong with it; empty when nothing is.
    """
    model_type = config.get("model_type")
    if model_type is None:
        for key in config:
            if did_you_mean(str(key).lower(), ["model_type"]):
                return {key: f"unknown key {key!r}; did you mean 'model_type'?"}
        return {
            "model_type": f"the key 'model_type' is missing (known: {', '.join(model_types())})"
        }
    if model_type not in model_types():
        return {"model_type": str(unknown_name("model type", model_type, model_types()))}
    table = tables().get(str(model_type))
    if table is None:
        return {}
    rest = {k: v for k, v in config.items() if k != "model_type" and k not in execution_fields}
    problems = check_values(rest, str(model_type))
    for key in rest:
        if key not in table and key not in LEGACY_KEYS:
            hint = did_you_mean(str(key), [*table, *LEGACY_KEYS, *execution_fields])
            problems[key] = f"unknown key {key!r}{hint}"
    return problems or _contradictions(lambda key: config.get(key, table[key]["default"]))


def check_values(values: Mapping[str, Any], model_type: str) -> dict[str, str]:
    """Types and bounds of an architecture's values; keys that it does not have are passed over."""
    known = {**tables().get(model_type, {}), **LEGACY_KEYS}
    problems = {k: _wrong(k, v, known[k]) for k, v in values.items() if k in known}
    return {key: message for key, message in problems.items() if message}


def _wrong(key: str, value: Any, entry: Mapping[str, Any]) -> str:
    """What is wrong with a value, or nothing."""
    if not any(_is(value, name) for name in entry["types"]):
        names = [n for n in entry["types"] if n != "integer" or "number" not in entry["types"]]
        return f"must be {' or '.join(_TYPES[name][1] for name in names)}, got {value!r}"
    if isinstance(value, str) and "known" in entry and value not in entry["known"]:
        return str(unknown_name(key, value, entry["known"]))
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
        least, most, words = _bounds(key, entry)
        if not least <= value <= most:
            return f"must be {words}, got {value!r}"
    return ""


def _bounds(key: str, entry: Mapping[str, Any]) -> tuple[float, float, str]:
    """Least and greatest value of a number, and in words."""
    if key.endswith("dropout"):
        return 0.0, math.nextafter(1.0, 0.0), "at least 0 and below 1"
    if key.endswith("_eps"):
        return math.nextafter(0.0, 1.0), 1.0, "above 0 and at most 1"
    if key == "initializer_range":
        return 0.0, 100.0, "between 0 and 100"
    if "integer" in entry["types"]:
        counts = key.startswith(("num_", "max_position")) or key.endswith(("_size", "_dim"))
        least = int(counts)
        return least, 2**31 - 1, f"between {least} and {2**31 - 1}"
    return math.nextafter(0.0, 1.0), 1e12, "above 0 and at most 1e12"


def _contradictions(value: Callable[[str], Any]) -> dict[str, str]:
    """Sizes of a decoder that cannot go together (keys that the architecture lacks are skipped)."""
    try:
        hidden, heads = value("hidden_size"), value("num_attention_heads")
        groups, head_dim = value("num_key_value_heads") or heads, value("head_dim")
    except KeyError:
        return {}
    if heads % groups:
        return {"num_key_value_heads": f"{groups} does not divide num_attention_heads ({heads})"}
    if head_dim is None and hidden % heads:
        return {
            "num_attention_heads": f"{heads} does not divide hidden_size ({hidden}): "
            "change one of them, or set head_dim"
        }
    return {}


def _is(value: object, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _TYPES[name][0])
