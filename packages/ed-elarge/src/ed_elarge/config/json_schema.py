"""The JSON schema of a run file, for editors: keys, types, meanings, names and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, JsonSchemaValue

from ed_elarge.config.normalize import WRAPPERS
from ed_elarge.config.reference import find_option_class, list_known_names, read_meanings
from ed_elarge.config.table import ACTIONS, SECTIONS

if TYPE_CHECKING:
    from pydantic.json_schema import CoreSchemaOrField
    from pydantic_core.core_schema import BeforeValidatorFunctionSchema

_REFERENCE = "#/$defs/{model}"
_TITLE = "elarge run file"


class _Lenient(GenerateJsonSchema):
    """Describes a type without a JSON form, such as a function, by the empty schema."""

    @property
    def mode(self) -> JsonSchemaMode:
        """Run files are read. The property of pydantic is slow, and called 40,000 times."""
        return "validation"

    def handle_invalid_for_json_schema(
        self, schema: CoreSchemaOrField, error_info: str
    ) -> JsonSchemaValue:
        """Return the empty schema."""
        return {}

    def encode_default(self, dft: object) -> Any:
        """Return the JSON form of a default; pydantic builds a serializer even for plain values."""
        if dft is None or type(dft) in (bool, int, float, str):
            return dft
        return [] if dft == () else super().encode_default(dft)

    def function_before_schema(self, schema: BeforeValidatorFunctionSchema) -> JsonSchemaValue:
        """Return the schema of a value that a function converts.

        The function accepts other spellings, which the schema of its result would refuse. Numbers
        and option classes keep their schemas: their functions refuse values.
        """
        value_schema = super().function_before_schema(schema)
        kind = schema["schema"].get("type")
        is_class = ("$ref" in value_schema or "properties" in value_schema) and kind not in (
            "enum",
            "literal",
        )
        return value_schema if is_class or kind in ("int", "float") else {}


def build_schema() -> dict[str, Any]:
    """Return the schema of run files."""
    defs: dict[str, Any] = {}
    sections = {
        name: _section(section.classes(), section.chosen_by, defs)
        for name, section in SECTIONS.items()
    }
    sections["include"] = {
        "description": "Files whose values this file completes and replaces.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    actions = {"description": "The actions of the run, in order.", **_actions(defs)}
    inner = {"type": "object", "properties": {**sections, "actions": actions}}
    wrappers = {name: {**inner, "additionalProperties": False} for name in WRAPPERS}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": _TITLE,
        **inner,
        "properties": {**inner["properties"], **wrappers},
        "additionalProperties": False,
        "$defs": defs,
    }


def _section(
    classes: Mapping[str, type[BaseModel]], chosen_by: str, defs: dict[str, Any]
) -> dict[str, Any]:
    references = {kind: _class(model, defs) for kind, model in classes.items()}
    if not chosen_by:
        (only,) = references.values()
        return {"anyOf": [only, {"type": "null"}]}
    kinds = [*classes]
    return {
        "type": "object",
        "properties": {chosen_by: {"enum": kinds, "default": kinds[0]}},
        "allOf": [
            {
                "if": {
                    "properties": {chosen_by: {"const": kind}},
                    **({} if kind == kinds[0] else {"required": [chosen_by]}),
                },
                "then": reference,
            }
            for kind, reference in references.items()
        ],
    }


def _class(model: type[BaseModel], defs: dict[str, Any]) -> dict[str, Any]:
    """Add an option class and its nested classes to the definitions; return the reference."""
    reference = {"$ref": _REFERENCE.format(model=model.__name__)}
    if model.__name__ in defs:
        return reference
    class_schema = model.model_json_schema(schema_generator=_Lenient, ref_template=_REFERENCE)
    inner = class_schema.pop("$defs", {})
    defs.update({name: value for name, value in inner.items() if name not in defs})
    if set(class_schema) == {"$ref"}:
        class_schema = inner[model.__name__]
    defs[model.__name__] = class_schema
    _describe(model, class_schema)
    for field in model.model_fields.values():
        child = find_option_class(field.annotation)
        if child is not None and child.__name__ in defs:
            _describe(child, defs[child.__name__])
    return reference


def _describe(model: type[BaseModel], class_schema: dict[str, Any]) -> None:
    """Add meanings, allowed names and other spellings to the schema of a class."""
    properties = class_schema.get("properties", {})
    docs = read_meanings(model)
    for name, field in model.model_fields.items():
        entry = properties.get(name)
        if entry is None or "description" in entry:
            continue
        entry.pop("title", None)
        if docs.get(name):
            entry["description"] = docs[name]
        allowed = list_known_names(field)
        if allowed and entry.get("type") == "string":
            entry["examples"] = allowed.split(", ")
    for alias, name in getattr(model, "ALIASES", {}).items():
        if name in properties:
            properties.setdefault(
                alias, {**properties[name], "description": f"Another name of {name}."}
            )


def _actions(defs: dict[str, Any]) -> dict[str, Any]:
    spellings = [n for name, kind in ACTIONS.items() for n in (name, *kind.aliases)]
    options = {
        spelling: {
            "description": kind.doc,
            "anyOf": [
                _class(kind.options, defs),
                {"type": "null"},
                *([{"type": ["string", "array"]}] if kind.scalar else []),
            ],
        }
        for name, kind in ACTIONS.items()
        for spelling in (name, *kind.aliases)
    }
    one = {"type": "object", "properties": options, "additionalProperties": False}
    item = {"anyOf": [{"enum": spellings}, {**one, "minProperties": 1, "maxProperties": 1}]}
    return {"anyOf": [{"enum": spellings}, {"type": "array", "items": item}, one]}
