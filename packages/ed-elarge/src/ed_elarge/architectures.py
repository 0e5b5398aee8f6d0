"""Which keys a Hugging Face model configuration has, known without importing transformers.

`architectures.json` is made from the configuration classes themselves by
`python -m ed_elarge.architectures`; a test makes it again and compares. A model type that is
installed as an `easydel.models` entry point but has no entry here is checked when it is built.
"""

from __future__ import annotations

import functools
import json
import types
import typing
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from ed_infra.errors import did_you_mean, unknown_name

#: Spellings of older `config.json` files, which transformers still reads.
LEGACY_KEYS: dict[str, list[str]] = {"rope_theta": ["number"], "rope_scaling": ["mapping", "null"]}

_NAMES = {int: "integer", float: "number", bool: "boolean", str: "string", type(None): "null"}
_PYTHON = {"integer": int, "number": (int, float), "boolean": bool, "string": str}
_WORDS = {"integer": "an integer", "number": "a number", "boolean": "true or false"}
_WORDS |= {"string": "text", "mapping": "a mapping", "list": "a list", "null": "null"}


@functools.cache
def tables() -> dict[str, dict[str, dict[str, Any]]]:
    """Model type -> key -> `{"types": [...], "default": ...}`."""
    return json.loads(resources.files("ed_elarge").joinpath("architectures.json").read_text())


@functools.cache
def model_types() -> tuple[str, ...]:
    """Every model type that an installed package offers."""
    return tuple(sorted({e.name for e in metadata.entry_points(group="easydel.models")}))


def check(config: dict[str, Any], execution_fields: typing.Collection[str]) -> dict[str, str]:
    """Check a `model.config` mapping.

    Args:
        config: what the user wrote.
        execution_fields: names that are ours, not the architecture's; checked elsewhere.

    Returns:
        Key -> what is wrong with it; empty when nothing is.
    """
    model_type = config.get("model_type")
    if model_type is None:
        return {
            "model_type": f"the key 'model_type' is missing (known: {', '.join(model_types())})"
        }
    if model_type not in model_types():
        return {"model_type": str(unknown_name("model type", model_type, model_types()))}
    table = tables().get(model_type)
    if table is None:
        return {}
    known = {key: entry["types"] for key, entry in table.items()} | LEGACY_KEYS
    problems = {}
    for key, value in config.items():
        if key == "model_type" or key in execution_fields:
            continue
        if key not in known:
            problems[key] = f"unknown key {key!r}{did_you_mean(key, [*known, *execution_fields])}"
        elif not any(_is(value, name) for name in known[key]):
            wanted = " or ".join(_WORDS[name] for name in known[key])
            problems[key] = f"must be {wanted}, got {value!r}"
    return problems or _contradictions(lambda key: config.get(key, table[key]["default"]))


def _contradictions(value: typing.Callable[[str], Any]) -> dict[str, str]:
    """Sizes of a decoder that cannot go together (keys that the architecture lacks are skipped)."""
    try:
        hidden, heads = value("hidden_size"), value("num_attention_heads")
        groups, head_dim = value("num_key_value_heads") or heads, value("head_dim")
    except KeyError:
        return {}
    if heads < 1 or groups < 1:
        return {"num_attention_heads": f"must be positive, got {heads} heads, {groups} groups"}
    if heads % groups:
        return {"num_key_value_heads": f"{groups} does not divide num_attention_heads ({heads})"}
    if head_dim is None and hidden % heads:
        return {
            "num_attention_heads": f"{heads} does not divide hidden_size ({hidden}): "
            "change one of them, or give head_dim"
        }
    return {}


def _is(value: Any, name: str) -> bool:
    if name in ("integer", "number") and isinstance(value, bool):
        return False
    if name == "null":
        return value is None
    if name == "mapping":
        return isinstance(value, dict)
    if name == "list":
        return isinstance(value, list)
    return isinstance(value, _PYTHON[name])


def _type_names(annotation: Any) -> list[str]:
    """`int | None` -> `["integer", "null"]`; what has no name here is skipped."""
    if annotation in _NAMES:
        return [_NAMES[annotation]]
    origin = typing.get_origin(annotation)
    if origin in (types.UnionType, typing.Union):
        return sorted({n for part in typing.get_args(annotation) for n in _type_names(part)})
    if origin is typing.Literal:
        return ["string"]
    if origin is list or annotation is list:
        return ["list"]
    is_mapping = isinstance(annotation, type) and issubclass(annotation, dict)
    return ["mapping"] if is_mapping or origin is dict else []


def generate() -> dict[str, dict[str, dict[str, Any]]]:
    """Read the tables off the transformers configuration classes of every known model type."""
    import dataclasses

    from transformers import CONFIG_MAPPING

    out: dict[str, dict[str, dict[str, Any]]] = {}
    for model_type in model_types():
        if model_type not in CONFIG_MAPPING:
            continue
        config = CONFIG_MAPPING[model_type]
        table: dict[str, dict[str, Any]] = {}
        for field in dataclasses.fields(config):
            if field.name == "transformers_version":
                continue
            annotation = field.type
            if isinstance(annotation, str):  # the common fields; torch.dtype may not be there
                names = {"dtype": str, "Literal": typing.Literal}
                annotation = eval(annotation.replace("torch.", ""), names)
            default = None if field.default is dataclasses.MISSING else field.default
            table[field.name] = {"types": _type_names(annotation), "default": default}
        out[model_type] = table
    return out


def render(generated: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The file's text: one line for each key."""
    models = []
    for model_type, table in sorted(generated.items()):
        rows = [f"  {json.dumps(key)}: {json.dumps(table[key])}" for key in sorted(table)]
        models.append(f" {json.dumps(model_type)}: {{\n" + ",\n".join(rows) + "\n }")
    return "{\n" + ",\n".join(models) + "\n}\n"


if __name__ == "__main__":
    path = Path(__file__).with_name("architectures.json")
    path.write_text(render(generate()))
    print(f"wrote {path}")
