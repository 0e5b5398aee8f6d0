"""JSON schemas in terms of keywords that llguidance supports: `uniqueItems` and `oneOf`.

A rewritten schema is at most stricter than the original. If no such schema is found, the keyword
stays, and the compiler rejects the schema.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ed_esurge.grammars.limits import resolve

#: Limit of the arrays that replace one `uniqueItems`, and of the alternatives of one `oneOf`.
MAX_ARRAYS, MAX_ALTERNATIVES = 330, 32
_TYPES = ("null", "boolean", "object", "array", "number", "string")
_INSIDE = ("items", "additionalProperties", "not", "if", "then", "else", "contains")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")


def rewritten(text: str) -> str:
    """Return the text of a schema without `uniqueItems` and `oneOf`, where that is possible."""
    if "uniqueItems" not in text and "oneOf" not in text:
        return text
    try:
        schema = json.loads(text)
        return json.dumps(_rewritten(schema, schema))
    except RecursionError:  # the compiler has its own limit of levels
        return text


def _rewritten(schema: Any, root: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for key in _INSIDE:
        if isinstance(result.get(key), dict):
            result[key] = _rewritten(result[key], root)
    for key in _LISTS:
        if isinstance(result.get(key), list):
            result[key] = [_rewritten(one, root) for one in result[key]]
    for key in _NAMED:
        if isinstance(result.get(key), dict):
            result[key] = {name: _rewritten(one, root) for name, one in result[key].items()}
    if "uniqueItems" in result:
        result = _unique(result, root)
    if isinstance(result.get("oneOf"), list) and "anyOf" not in result:
        apart = _apart(result["oneOf"], root)
        if apart is not None:
            del result["oneOf"]
            result["anyOf"] = apart
    return result


# ---- uniqueItems


def _unique(schema: dict[str, Any], root: Any) -> dict[str, Any]:
    """Return a schema of an array without `uniqueItems`."""
    rest = {key: value for key, value in schema.items() if key != "uniqueItems"}
    if schema["uniqueItems"] is False:
        return rest
    low, high = schema.get("minItems", 0), schema.get("maxItems")
    if schema.get("type") != "array" or not isinstance(low, int):
        return schema
    if high is not None and isinstance(high, int) and high <= 1:
        return rest
    values = _values(schema.get("items"), root)
    if values is None or "prefixItems" in schema or "contains" in schema:
        return schema
    high = min(len(values), high if isinstance(high, int) else len(values))
    counts, arrays_left = range(max(low, 0), high + 1), MAX_ARRAYS
    for count in counts:
        # More values than arrays are refused before the product, which has thousands of digits.
        if count > 0 and len(values) > MAX_ARRAYS:
            return schema
        arrays_left -= math.perm(len(values), count)
        if arrays_left < 0:
            return schema
    arrays = [
        {
            "type": "array",
            "prefixItems": [{"const": value} for value in order],
            "items": False,
            "minItems": count,
        }
        for count in counts
        for order in itertools.permutations(values, count)
    ]
    known = ("type", "items", "minItems", "maxItems")
    others = {key: value for key, value in rest.items() if key not in known}
    return {**others, "anyOf": arrays or [False]} if "anyOf" not in others else schema


def _values(schema: Any, root: Any) -> list[Any] | None:
    """Return the distinct values of a schema, if they are listed."""
    schema = _target(schema, root)
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        listed = [schema["const"]]
    elif isinstance(schema.get("enum"), list):
        listed = schema["enum"]
    elif schema.get("type") == "boolean":
        listed = [False, True]
    elif schema.get("type") == "null":
        listed = [None]
    else:
        return None
    kinds = schema.get("type")
    allowed = _types(schema) if kinds is not None else set(_TYPES)
    if not set(schema) <= {"const", "enum", "type", "title", "description", "default"}:
        return None
    return [*{_key(value): value for value in listed if _type_of(value) in allowed}.values()]


def _key(value: Any) -> str:
    """Return a text that is equal for equal JSON values: 1 and 1.0 are equal, 1 and true not."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return value


# ---- oneOf


def _apart(options: list[Any], root: Any) -> list[Any] | None:
    """Return alternatives of which a value never matches two; None if that is not possible.

    An object of one alternative loses the properties that other alternatives require.
    """
    if not 0 < len(options) <= MAX_ALTERNATIVES:
        return None
    known = [_target(one, root) for one in options]
    if not all(isinstance(one, dict) for one in known):
        return None
    lists = [_values(one, root) for one in known]
    if all(one is not None for one in lists):
        every = [value for one in lists if one is not None for value in one]
        counts = Counter(map(_key, every))
        once = [one for one in every if counts[_key(one)] == 1]
        return [{"enum": once}] if once else None
    without: list[set[str]] = [set() for _ in known]
    for (i, one), (j, other) in itertools.combinations(enumerate(known), 2):
        if _disjoint(one, other, root):
            continue
        free = _required(other) - _required(one)
        back = _required(one) - _required(other)
        if free and _is_object(one):
            without[i].add(min(free))
        elif back and _is_object(other):
            without[j].add(min(back))
        else:
            return None
        if not (_is_object(one) and _is_object(other)):
            return None
    return [
        one if not names else _without(target, names)
        for one, target, names in zip(options, known, without, strict=True)
    ]


def _without(schema: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    properties = dict(schema.get("properties", {}))
    if schema.get("additionalProperties") is False:
        for name in names:
            properties.pop(name, None)
    else:
        properties |= dict.fromkeys(names, False)
    return {**schema, "properties": properties}


def _disjoint(one: Mapping[str, Any], other: Mapping[str, Any], root: Any) -> bool:
    """Return whether no value matches both schemas."""
    if not _types(one) & _types(other):
        return True
    values, others = _values(one, root), _values(other, root)
    if values is not None and others is not None:
        return not set(map(_key, values)) & set(map(_key, others))
    if not (_is_object(one) and _is_object(other)):
        return False
    if one.get("additionalProperties") is False and _required(other) - _names(one):
        return True
    if other.get("additionalProperties") is False and _required(one) - _names(other):
        return True
    for name in _required(one) & _required(other):
        left, right = (_target(x.get("properties", {}).get(name), root) for x in (one, other))
        if isinstance(left, dict) and isinstance(right, dict):
            a, b = _values(left, root), _values(right, root)
            if not _types(left) & _types(right):
                return True
            if None not in (a, b) and not set(map(_key, a or ())) & set(map(_key, b or ())):
                return True
    return False


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types of the values of a schema; integers are numbers."""
    kinds = schema.get("type")
    if kinds is None:
        if "const" in schema:
            return {_type_of(schema["const"])}
        if isinstance(schema.get("enum"), list):
            return {_type_of(value) for value in schema["enum"]}
        return set(_TYPES)
    listed = kinds if isinstance(kinds, list) else [kinds]
    return {"number" if kind == "integer" else str(kind) for kind in listed}


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _is_object(schema: Mapping[str, Any]) -> bool:
    """Return whether all values are objects whose properties this schema itself describes."""
    simple = {
        *("type", "properties", "required", "additionalProperties"),
        *("title", "description", "default", "$defs", "definitions"),
    }
    return schema.get("type") == "object" and set(schema) <= simple


def _required(schema: Mapping[str, Any]) -> set[str]:
    listed = schema.get("required")
    return {name for name in listed if isinstance(name, str)} if isinstance(listed, list) else set()


def _names(schema: Mapping[str, Any]) -> set[str]:
    properties = schema.get("properties")
    return set(properties) if isinstance(properties, Mapping) else set()


def _target(schema: Any, root: Any) -> Any:
    """Return the schema that a reference names."""
    if isinstance(schema, dict) and isinstance(schema.get("$ref"), str) and len(schema) == 1:
        return resolve(root, schema["$ref"])
    return schema
