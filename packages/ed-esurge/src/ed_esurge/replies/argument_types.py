"""Types of the arguments of a function, read from its JSON schema.

Formats with tags write each argument as text. The schema decides whether the text is the value, or
whether it is JSON. Pydantic writes an optional text as `anyOf`, and a named type as `$ref`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import unquote

from ed_esurge.replies.json_text import dumps, loads
from ed_esurge.replies.python_text import literal_value
from ed_esurge.replies.scanner import Malformed

_KINDS = frozenset(("string", "integer", "number", "boolean", "null", "array", "object"))
_TEXT = frozenset(("string",))
#: Numbers that begin with a plus sign or zeros, which JSON does not allow.
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")
_LEADING = re.compile(r"^\+?(-?)0*(?=\d)")
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}


class ArgumentTypes:
    """The types of the arguments of one function.

    Args:
        schema: JSON schema of all arguments.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._root = schema
        self._properties: dict[str, Any] = {}
        self._kinds: dict[int, frozenset[str]] = {}

    def property(self, key: str) -> Any:
        """Return the schema of an argument. True permits any value."""
        if key not in self._properties:
            self._properties[key] = self.member(self._root, key)
        return self._properties[key]

    def declares(self, key: str) -> bool:
        """Return whether the schema names an argument."""
        return self._member(self._root, key, set()) is not None

    def allows(self, key: str) -> bool:
        """Return whether an argument may have a name: a declared one, or any if none is."""
        return self.declares(key) or self._collect_keyword(self._root, "properties", set()) is None

    def member(self, schema: object, key: str) -> Any:
        """Return the schema of a value within objects of a schema."""
        member = self._member(schema, key, set())
        return True if member is None else member

    def item(self, schema: object) -> Any:
        """Return the schema of the items of lists of a schema."""
        items = self._collect_keyword(schema, "items", set())
        return True if items is None else items

    def kinds(self, schema: object) -> frozenset[str]:
        """Return the JSON types that a schema permits."""
        if not isinstance(schema, Mapping):
            return frozenset() if schema is False else _KINDS
        schema_kinds = self._kinds.get(id(schema))
        if schema_kinds is None:
            self._kinds[id(schema)] = _KINDS  # for a reference to itself
            schema_kinds = self._kinds[id(schema)] = self._find_kinds(schema)
        return schema_kinds

    def takes_text_only(self, schema: object) -> bool:
        """Return whether each value of a schema is a string."""
        return self.kinds(schema) == _TEXT

    def permits(self, schema: object, value: object) -> bool:
        """Return whether a value has a type, or is one of the constants, that a schema permits."""
        return self._permits(schema, value, {})

    def convert(self, text: str, schema: object, *, marked_json: str | None = None) -> str:
        """Return the JSON text of a value.

        Args:
            text: the value as text.
            schema: JSON schema of the value.
            marked_json: the JSON text that the model marked as JSON; None = the model did not mark
                it.
        """
        kinds = self.kinds(schema)
        source_text = (text if marked_json is None else marked_json).strip()
        if _NUMBER.fullmatch(source_text) and "string" not in kinds:
            source_text = _LEADING.sub(r"\1", source_text)
        try:
            value = loads(_PYTHON_NAMES.get(source_text, source_text))
        except Malformed:
            if source_text[:1] in ("[", "{") and "string" not in kinds:
                return self._convert_literal(source_text, text)
            return dumps(text)
        quoted = isinstance(value, str)
        literal = quoted and marked_json is None and "string" in kinds and kinds != _KINDS
        if not literal and self.permits(schema, value):
            return dumps(value)
        if "string" in kinds and (literal or self.permits(schema, text)):
            return dumps(text)
        if quoted and "string" not in kinds:
            return self._convert_quoted(str(value), schema)
        return dumps(text if "string" in kinds else value)

    def _convert_literal(self, source_text: str, text: str) -> str:
        try:
            return dumps(literal_value(source_text))
        except Malformed:
            return dumps(text)

    def _convert_quoted(self, value: str, schema: object) -> str:
        """Return a value that the model put between quotes although it is no text."""
        try:
            inner = loads(value)
        except Malformed:
            return dumps(value)
        return dumps(inner if self.permits(schema, inner) else value)

    def _find_kinds(self, schema: Mapping[str, Any]) -> frozenset[str]:
        kinds = _KINDS
        declared = schema.get("type")
        names = {declared} if isinstance(declared, str) else _members(declared)
        names = {name for name in names if isinstance(name, str) and name in _KINDS}
        if names:
            kinds = _widen(names | ({"null"} if schema.get("nullable") is True else set()))
        if "const" in schema:
            kinds &= _kinds_of_value(schema["const"])
        if isinstance(schema.get("enum"), list):
            kinds &= frozenset().union(*map(_kinds_of_value, schema["enum"]))
        if "$ref" in schema:
            kinds &= self.kinds(self._resolve(schema["$ref"]))
        for name in ("anyOf", "oneOf"):
            if _members(schema.get(name)):
                kinds &= frozenset().union(*map(self.kinds, schema[name]))
        for part in _members(schema.get("allOf")):
            kinds &= self.kinds(part)
        return kinds

    def _permits(self, schema: object, value: object, memo: dict[int, bool]) -> bool:
        if not isinstance(schema, Mapping):
            return schema is not False
        if id(schema) not in memo:
            memo[id(schema)] = True  # for a reference to itself
            memo[id(schema)] = self._follows(schema, value, memo)
        return memo[id(schema)]

    def _follows(self, schema: Mapping[str, Any], value: object, memo: dict[int, bool]) -> bool:
        if not self.kinds(schema) & _kinds_of_value(value):
            return False
        if "const" in schema and not _equal(schema["const"], value):
            return False
        options = schema.get("enum")
        if isinstance(options, list) and not any(_equal(option, value) for option in options):
            return False
        if "$ref" in schema and not self._permits(self._resolve(schema["$ref"]), value, memo):
            return False
        for name in ("anyOf", "oneOf"):
            members = _members(schema.get(name))
            if members and not any(self._permits(member, value, memo) for member in members):
                return False
        return all(self._permits(part, value, memo) for part in _members(schema.get("allOf")))

    def _member(self, schema: object, key: str, seen: set[int]) -> Any:
        """Return the schema of a member; None if the schema does not mention it."""

        def direct(one: Mapping[str, Any]) -> Any:
            properties = one.get("properties")
            if isinstance(properties, Mapping) and key in properties:
                return properties[key]
            additional_schema = one.get("additionalProperties")
            return additional_schema if isinstance(additional_schema, Mapping) else None

        return self._collect(schema, direct, seen)

    def _collect_keyword(self, schema: object, name: str, seen: set[int]) -> Any:
        return self._collect(schema, lambda one: one.get(name), seen)

    def _collect(
        self, schema: object, direct: Callable[[Mapping[str, Any]], Any], seen: set[int]
    ) -> Any:
        """Return what a schema and the schemas that it names say, as one schema; None = nothing."""
        if not isinstance(schema, Mapping) or id(schema) in seen:
            return None
        seen.add(id(schema))
        parts = [direct(schema)]
        if "$ref" in schema:
            parts.append(self._collect(self._resolve(schema["$ref"]), direct, seen))
        parts += [self._collect(one, direct, seen) for one in _members(schema.get("allOf"))]
        for name in ("anyOf", "oneOf"):
            options = [self._collect(one, direct, seen) for one in _members(schema.get(name))]
            options = [option for option in options if option is not None]
            if options:
                parts.append({"anyOf": options})
        parts = [part for part in parts if part is not None]
        if len(parts) > 1:
            return {"allOf": parts}
        return parts[0] if parts else None

    def _resolve(self, reference: object) -> Any:
        """Return the schema at a reference within the whole schema; True if there is none."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return True
        place = self._root
        for step in unquote(reference[1:]).split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(place, Mapping) and key in place:
                place = place[key]
            elif isinstance(place, list) and key.isdecimal() and int(key[:6]) < len(place):
                place = place[int(key[:6])]
            else:
                return True
        return place


def _members(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _widen(names: Iterable[str]) -> frozenset[str]:
    kinds = frozenset(names)
    return kinds | {"integer"} if "number" in kinds else kinds


def _kinds_of_value(value: object) -> frozenset[str]:
    match value:
        case None:
            return frozenset(("null",))
        case bool():
            return frozenset(("boolean",))
        case int():
            return frozenset(("integer", "number"))
        case float():
            return frozenset(("number", "integer") if value.is_integer() else ("number",))
        case str():
            return _TEXT
        case list():
            return frozenset(("array",))
        case Mapping():
            return frozenset(("object",))
    return frozenset()


def _equal(one: object, other: object) -> bool:
    """Return whether two JSON values are equal: True is not 1, and 1.0 is 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)
