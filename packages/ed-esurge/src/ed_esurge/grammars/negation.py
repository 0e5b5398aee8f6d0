"""Schemas that `not` describes, without the keyword `not`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ed_esurge.grammars.limits import resolve_pointer

TYPES = ("null", "boolean", "object", "array", "number", "string")
#: Keywords without an effect on the values.
ANNOTATIONS = {
    *("title", "description", "default", "examples", "example", "deprecated", "$comment", "$id"),
    *("readOnly", "writeOnly", "id", "$schema", "$anchor"),
}
#: Limits of the strings that a pattern excludes: their number, and their characters together.
MAX_EXCLUDED, MAX_EXCLUDED_CHARACTERS = 64, 512
#: Keyword -> keyword of the opposite, change of its value, and the type that both describe.
_OPPOSITES = {
    "minLength": ("maxLength", -1, "string"),
    "maxLength": ("minLength", 1, "string"),
    "minItems": ("maxItems", -1, "array"),
    "maxItems": ("minItems", 1, "array"),
    "minimum": ("exclusiveMaximum", 0, "number"),
    "maximum": ("exclusiveMinimum", 0, "number"),
    "exclusiveMinimum": ("maximum", 0, "number"),
    "exclusiveMaximum": ("minimum", 0, "number"),
}


def negate(schema: object, base: Mapping[str, Any], root: object) -> list[Any]:
    """Return schemas of values that match a base and do not match a schema.

    Each schema is complete without the base, except for the base's own keywords. Values for which
    no schema can be written are missing, so an empty list means that none is known.

    Args:
        schema: the schema that values must not match.
        base: the other keywords, which all values match.
        root: the schema that references are relative to.
    """
    schema = resolve_reference(schema, root)
    if schema is False or schema == {"not": {}}:
        return [{}]
    if not isinstance(schema, dict):
        return []
    kinds = get_types(base)
    options: list[Any] = []
    if "type" in schema:
        excluded = get_types(schema)
        remaining_types = [kind for kind in TYPES if kind not in excluded and kind in kinds]
        if remaining_types:
            options.append({"type": remaining_types})
    if "object" in kinds:
        options += _negate_object(schema, base, root)
    options += _negate_values(schema, base, kinds)
    for keyword, (opposite, step, kind) in _OPPOSITES.items():
        bound = schema.get(keyword)
        if isinstance(bound, bool) or not isinstance(bound, int | float) or kind not in kinds:
            continue
        if not step or bound + step >= 0:
            options.append({"type": kind, opposite: bound + step})
    if "not" in schema:
        options.append(schema["not"])
    for member in _get_list(schema, "allOf"):
        options += negate(member, base, root)
    for keyword in ("anyOf", "oneOf"):
        parts = [negate(member, base, root) for member in _get_list(schema, keyword)]
        if parts and all(parts):
            options.append({"allOf": [_build_union(part) for part in parts]})
    return [{}] if {} in options else options


def exclude(base: Mapping[str, Any], options: Sequence[Any]) -> dict[str, Any]:
    """Return a base with the condition that one of the options matches."""
    if options == [{}]:
        return dict(base)
    if len(options) == 1 and _forbids_only(options[0]) and "$ref" not in base:
        properties = {**base.get("properties", {}), **options[0]["properties"]}
        return {**base, "type": "object", "properties": properties}
    return {**base, "allOf": [*_get_list(base, "allOf"), _build_union(options)]}


def get_types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types of the values of a schema; integers are numbers."""
    kinds = schema.get("type")
    if kinds is None:
        if "const" in schema:
            return {get_type(schema["const"])}
        if isinstance(schema.get("enum"), list):
            return {get_type(value) for value in schema["enum"]}
        return set(TYPES)
    listed = kinds if isinstance(kinds, list) else [kinds]
    return {"number" if kind == "integer" else str(kind) for kind in listed}


def get_type(value: object) -> str:
    """Return the type of a JSON value; integers are numbers."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def resolve_reference(schema: object, root: object) -> Any:
    """Return the schema that a reference names. Annotations beside the reference are left out."""
    if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
        return (
            resolve_pointer(root, schema["$ref"])
            if set(schema) <= ANNOTATIONS | {"$ref"}
            else schema
        )
    return schema


def required_names(schema: Mapping[str, Any]) -> set[str]:
    """Return the names of required properties."""
    listed = schema.get("required")
    return {name for name in listed if isinstance(name, str)} if isinstance(listed, list) else set()


def _get_list(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _build_union(options: Sequence[Any]) -> Any:
    return options[0] if len(options) == 1 else {"anyOf": [*options]}


def _forbids_only(option: object) -> bool:
    if not isinstance(option, Mapping):
        return False
    return set(option) == {"type", "properties"} and [*option["properties"].values()] == [False]


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _negate_object(
    schema: Mapping[str, Any], base: Mapping[str, Any], root: object
) -> Iterable[Any]:
    """Yield schemas of objects that lack a required property, or have one with another value."""
    properties, required = _properties(base), required_names(base)
    closed = base.get("additionalProperties") is False and "patternProperties" not in base
    for name in sorted(required_names(schema)):
        if closed and name not in properties:
            yield {}
        elif name not in required:
            yield {"type": "object", "properties": {name: False}}
    for name, inner in _properties(schema).items():
        if closed and name not in properties:
            continue
        base_schema = resolve_reference(properties.get(name, {}), root)
        for option in negate(inner, base_schema if isinstance(base_schema, dict) else {}, root):
            yield {"type": "object", "properties": {name: option}, "required": [name]}


def _negate_values(
    schema: Mapping[str, Any], base: Mapping[str, Any], kinds: set[str]
) -> Iterable[Any]:
    """Yield schemas of values that are not listed."""
    if "const" not in schema and not isinstance(schema.get("enum"), list):
        return
    listed = [schema["const"]] if "const" in schema else schema["enum"]
    base_values = [base["const"]] if "const" in base else base.get("enum")
    if base_values is None and kinds <= {"boolean", "null"}:
        base_values = [value for value in (None, False, True) if get_type(value) in kinds]
    if isinstance(base_values, list):
        remaining_values = [
            v for v in base_values if not any(get_type(v) == get_type(w) and v == w for w in listed)
        ]
        if remaining_values:
            yield {"enum": remaining_values}
        return
    remaining_types = [
        kind for kind in TYPES if kind in kinds - {get_type(value) for value in listed}
    ]
    if remaining_types:
        yield {"type": remaining_types}
    texts = {value for value in listed if isinstance(value, str)}
    if texts == {""} and "string" in kinds:
        yield {"type": "string", "minLength": 1}
        return
    few = len(texts) <= MAX_EXCLUDED and sum(map(len, texts)) <= MAX_EXCLUDED_CHARACTERS
    if texts and few and "string" in kinds:
        yield {"type": "string", "pattern": other_texts(texts)}


def other_texts(texts: set[str]) -> str:
    """Return a regular expression of all texts except the given ones."""
    prefixes = sorted({text[:length] for text in texts for length in range(len(text) + 1)})
    branches = []
    for prefix in prefixes:
        nexts = sorted({one[len(prefix)] for one in prefixes if _extends(one, prefix)})
        start = re.escape(prefix)
        if prefix not in texts:
            branches.append(start)
        next_characters = "".join(f"\\u{{{ord(char):x}}}" for char in nexts)
        branches.append(f"{start}[^{next_characters}](.|\\n)*" if nexts else f"{start}(.|\\n)+")
    return f"^({'|'.join(branches)})$"


def _extends(text: str, prefix: str) -> bool:
    return len(text) == len(prefix) + 1 and text.startswith(prefix)
