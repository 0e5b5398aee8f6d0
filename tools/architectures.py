"""Write the table of Hugging Face config keys that ed-elarge checks `model.config` with.

    uv run python -m tools.architectures    rewrite architectures.json of ed-elarge

The table is read off the configuration classes of transformers, so that a run file can be checked
without importing them; a test makes it again and compares.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from typing import Any

from ed_elarge.config.checks.architectures import model_types

from tools.workspace import ROOT

PATH = ROOT / "packages/ed-elarge/src/ed_elarge/config/checks/architectures.json"
_NAMES = {int: "integer", float: "number", bool: "boolean", str: "string", type(None): "null"}


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
    from ed_layers.activations import ACTIVATIONS
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
            if field.name == "hidden_act":
                table[field.name]["known"] = sorted(ACTIVATIONS)
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
    PATH.write_text(render(generate()), encoding="utf-8")
    print(f"wrote {PATH}")
