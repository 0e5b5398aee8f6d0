"""Schemas that `not` describes, without the keyword `not`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ed_esurge.grammars.limits import resolve

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
    schema = target_of(schema, root)
    if schema is False or schema == {"not": {}}:
        return [{}]
    if not isinstance(schema, dict):
        return []
    kinds = types_of(base)
    options: list[Any] = []
    if "type" in schema:
        excluded = types_of(schema)
        others = [kind for kind in TYPES if kind not in excluded and kind in kinds]
        if others:
            options.append({"type": others})
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
    for member in _listed(schema, "allOf"):
        options += negate(member, base, root)
    for keyword in ("anyOf", "oneOf"):
        parts = [negate(member, base, root) for member in _listed(schema, keyword)]
        if parts and all(parts):
            options.append({"allOf": [_any_of(part) for part in parts]})
    return [{}] if {} in options else options


def exclude(base: Mapping[str, Any], options: Sequence[Any]) -> dict[str, Any]:
    """Return a base with the condition that one of the options matches."""
    if options == [{}]:
        return dict(base)
    if len(options) == 1 and _forbids_only(options[0]) and "$ref" not in base:
        properties = {**base.get("properties", {}), **options[0]["properties"]}
        return {**base, "type": "object", "properties": properties}
    return {**base, "allOf": [*_listed(base, "allOf"), _any_of(options)]}


def types_of(schema: Mapping[str, Any]) -> set[str]:
    """Return the types of the values of a schema; integers are numbers."""
    kinds = schema.get("type")
    if kinds is None:
        if "const" in schema:
            return {type_of(schema["const"])}
        if isinstance(schema.get("enum"), list):
            return {type_of(value) for value in schema["enum"]}
        return set(TYPES)
    listed = kinds if isinstance(kinds, list) else [kinds]
    return {"number" if kind == "integer" else str(kind) for kind in listed}


def type_of(value: object) -> str:
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


def target_of(schema: Any, root: Any) -> Any:
    """Return the schema that a reference names. Annotations beside the reference are left out."""
    if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
        return resolve(root, schema["$ref"]) if set(schema) <= ANNOTATIONS | {"$ref"} else schema
    return schema


def required_names(schema: Mapping[str, Any]) -> set[str]:
    """Return the names of required properties."""
    listed = schema.get("required")
    return {name for name in listed if isinstance(name, str)} if isinstance(listed, list) else set()


def _listed(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _any_of(options: Sequence[Any]) -> Any:
    return options[0] if len(options) == 1 else {"anyOf": [*options]}


def _forbids_only(option: Any) -> bool:
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
        here = target_of(properties.get(name, {}), root)
        for option in negate(inner, here if isinstance(here, dict) else {}, root):
            yield {"type": "object", "properties": {name: option}, "required": [name]}


def _negate_values(
    schema: Mapping[str, Any], base: Mapping[str, Any], kinds: set[str]
) -> Iterable[Any]:
    """Yield schemas of values that are not listed."""
    if "const" not in schema and not isinstance(schema.get("enum"), list):
        return
    listed = [schema["const"]] if "const" in schema else schema["enum"]
    known = [base["const"]] if "const" in base else base.get("enum")
    if known is None and kinds <= {"boolean", "null"}:
        known = [value for value in (None, False, True) if type_of(value) in kinds]
    if isinstance(known, list):
        rest = [v for v in known if not any(type_of(v) == type_of(w) and v == w for w in listed)]
        if rest:
            yield {"enum": rest}
        return
    others = [kind for kind in TYPES if kind in kinds - {type_of(value) for value in listed}]
    if others:
        yield {"type": others}
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
        after = "".join(f"\\u{{{ord(char):x}}}" for char in nexts)
        branches.append(f"{start}[^{after}](.|\\n)*" if nexts else f"{start}(.|\\n)+")
    return f"^({'|'.join(branches)})$"


def _extends(text: str, prefix: str) -> bool:
    return len(text) == len(prefix) + 1 and text.startswith(prefix)
