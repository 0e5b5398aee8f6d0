"""Keywords of one JSON schema that llguidance lacks: removed without effect, or replaced."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from ed_esurge.grammars.limits import GrammarError
from ed_esurge.grammars.negation import exclude, negate, required_names, types_of

_COUNTS = ("Length", "Items", "Properties", "Contains")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_EXACT = 2**53
_ANNOTATIONS = {
    *("title", "description", "default", "examples", "example", "deprecated", "$comment", "$id"),
    *("readOnly", "writeOnly", "id", "$schema", "$anchor"),
}
_APPLICATORS = (
    *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef"),
    *("dependentSchemas", "dependencies", "contains"),
)
#: Limit of the dependencies of one schema; each doubles the number of cases.
MAX_DEPENDENCIES = 8

_YEAR = r"([1-9]\d{3}|0[1-9]\d{2}|00[1-9]\d|000[1-9])"
_FOURTH = "(0[48]|[2468][048]|[13579][26])"
_DATE = (
    rf"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)"
    rf"|02-(0[1-9]|1\d|2[0-8]))|(\d\d{_FOURTH}|{_FOURTH}00)-02-29)"
)
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_ESCAPED = "([A-Za-z0-9_.~!$&'()*+,;=@-]|%[0-9A-Fa-f]{2})"
_PATH = rf"(/|{_ESCAPED}+(/{_ESCAPED}*)*|/{_ESCAPED}+(/{_ESCAPED}*)*)?"
_REFERENCE = (
    rf"^(https?://[a-z0-9]+(\.[a-z0-9]+)*)?{_PATH}(\?({_ESCAPED}|[/?:])*)?(#({_ESCAPED}|[/?:])*)?$"
)
_POINTER = r"(/([^/~\x00-\x1f]|~[01])*)*"
#: Formats that llguidance does not know or knows inexactly -> a pattern; None = any string.
FORMATS: dict[str, str | None] = {
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "uri-reference": _REFERENCE,
    "iri-reference": _REFERENCE,
    "uri-template": _REFERENCE,
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": rf"^(0|[1-9]\d{{0,8}})(#|{_POINTER})$",
    "regex": r"^([A-Za-z0-9 _,:;=@<>/-]|\\[dswDSW.]|\[[a-z0-9_]+\][*+?]?)*$",
    "byte": "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
    "base64": "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
    "color": "^#([0-9A-Fa-f]{3}|[0-9A-Fa-f]{6})$",
    **dict.fromkeys(("int32", "int64"), r"^-?\d{1,9}$"),
    **dict.fromkeys(("float", "double", "decimal"), r"^-?\d{1,15}(\.\d{1,15})?$"),
    # Registered names that specify how a program shows or stores a string.
    **dict.fromkeys(("binary", "password", "html", "markdown", "commonmark", "text", "string")),
    **dict.fromkeys(("textarea", "style", "phone", "char", "file", "path", "json", "yaml")),
}
#: Formats with another name that llguidance knows.
_SAME = {
    "iri": "uri",
    "url": "uri",
    "idn-email": "email",
    "idn-hostname": "hostname",
    "host-name": "hostname",
    "ip-address": "ipv4",
    "guid": "uuid",
    "datetime": "date-time",
}


def simplify_keywords(schema: dict[str, Any], root: object, path: str) -> dict[str, Any]:
    """Return a schema that matches the same values, or fewer, with fewer keywords.

    Args:
        root: the schema that references are relative to.
        path: JSON path of the schema, for errors.

    Raises:
        GrammarError: llguidance would match the schema wrongly.
    """
    result = dict(schema)
    for key, value in schema.items():
        if key[:3] in ("min", "max") and key[3:] in _COUNTS and isinstance(value, float):
            result[key] = int(value) if value.is_integer() else value
    _limit_bounds(result, path)
    _simplify_format(result)
    _simplify_unevaluated(result)
    _simplify_contains(result)
    _simplify_names(result)
    _merge_patterns(result, path)
    result = _simplify_dependencies(result)
    result = _simplify_condition(result, root)
    if "not" in result:
        unwanted = result.pop("not")
        options = negate(unwanted, result, root)
        result = exclude(result, options) if options else {**result, "not": unwanted}
    return result


def _limit_bounds(schema: dict[str, Any], path: str) -> None:
    """Move bounds that are no 64-bit floats inward, where numbers below 2^53 remain."""
    for key in _BOUNDS:
        bound = schema.get(key)
        if not isinstance(bound, int) or isinstance(bound, bool) or abs(bound) <= _EXACT:
            continue
        is_lowest = "inimum" in key
        inner = abs(bound) < 2**64 and key != "multipleOf" and is_lowest == (bound < 0)
        if not inner:
            raise GrammarError(
                f"at {path}: the range of numbers is not supported: `{key}` is {bound!s:.24}, and "
                "numbers beyond 2^53 are not exact. Use a bound of fewer digits, or none."
            )
        # The next float towards zero is exact, and is at most as wide.
        rounded = float(bound)
        if abs(int(rounded)) > abs(bound):
            rounded = math.nextafter(rounded, 0.0)
        schema[key] = int(rounded)


def _simplify_format(schema: dict[str, Any]) -> None:
    name = schema.get("format")
    if not isinstance(name, str):
        return
    if "string" not in types_of(schema):
        del schema["format"]
        return
    schema["format"] = name = _SAME.get(name, name)
    if name not in FORMATS:
        return
    del schema["format"]
    pattern = FORMATS[name]
    if pattern is not None and "pattern" in schema:
        schema["allOf"] = [*schema.get("allOf", []), {"pattern": pattern}]
    elif pattern is not None:
        schema["pattern"] = pattern


def _is_everything(schema: object, kind: str | None = None) -> bool:
    """Return whether a schema matches every value, or every value of a type."""
    if not isinstance(schema, Mapping):
        return schema is True
    rest = set(schema) - _ANNOTATIONS
    return not rest or (kind is not None and rest == {"type"} and kind in types_of(schema))


def _simplify_unevaluated(schema: dict[str, Any]) -> None:
    for key, plain in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "")):
        if key not in schema:
            continue
        if _is_everything(schema[key]):
            del schema[key]
        elif not any(name in schema for name in _APPLICATORS):
            value = schema.pop(key)
            schema.setdefault(plain or "items", value)


def _simplify_contains(schema: dict[str, Any]) -> None:
    if "contains" not in schema:
        schema.pop("minContains", None)
        schema.pop("maxContains", None)
    elif schema.get("minContains") == 0 and "maxContains" not in schema:
        del schema["contains"], schema["minContains"]
    elif _is_everything(schema["contains"]) and "maxContains" not in schema:
        del schema["contains"]
        low = schema.pop("minContains", 1)
        schema["minItems"] = max(schema.get("minItems", 0), low)


def _simplify_names(schema: dict[str, Any]) -> None:
    names = schema.get("propertyNames")
    if names is None:
        return
    if _is_everything(names, "string"):
        del schema["propertyNames"]
        return
    if not isinstance(names, Mapping) or "patternProperties" in schema:
        return
    keys = set(names) - _ANNOTATIONS - {"type"}
    rest = schema.get("additionalProperties", {})
    properties = schema.get("properties", {})
    if keys == {"enum"} and isinstance(names["enum"], list) and isinstance(properties, Mapping):
        listed = [name for name in names["enum"] if isinstance(name, str)]
        schema["properties"] = {name: properties.get(name, rest) for name in listed}
    elif keys == {"pattern"} and not properties:
        schema["patternProperties"] = {names["pattern"]: rest}
    elif keys <= {"minLength", "maxLength"} and not properties:
        low, high = names.get("minLength", 0), names.get("maxLength", "")
        schema["patternProperties"] = {f"^(.|\\n){{{low},{high}}}$": rest}
    else:
        return
    schema["additionalProperties"] = False
    del schema["propertyNames"]


def _merge_patterns(schema: dict[str, Any], path: str) -> None:
    """Merge the patterns of single names with their properties, and refuse other overlaps."""
    patterns, properties = schema.get("patternProperties"), schema.get("properties")
    if not isinstance(patterns, Mapping) or not isinstance(properties, Mapping):
        return
    left, merged = dict(patterns), dict(properties)
    for pattern, inner in patterns.items():
        try:
            expression = re.compile(pattern)
        except (re.error, RecursionError, OverflowError):
            continue
        overlaps = [name for name in properties if expression.search(name)]
        if not overlaps:
            continue
        for name in overlaps:
            if not _is_everything(inner) and inner != properties[name]:
                merged[name] = {"allOf": [properties[name], inner]}
        if not re.fullmatch(r"\^[\w -]+\$", pattern):
            raise GrammarError(
                f"at {path}: `patternProperties` {pattern!r:.80} also matches the property "
                f"{overlaps[0]!r:.80} of `properties`. Use a pattern that matches no other name."
            )
        del left[pattern]
    schema["properties"] = merged
    if left:
        schema["patternProperties"] = left
    else:
        del schema["patternProperties"]


def _simplify_dependencies(schema: dict[str, Any]) -> dict[str, Any]:
    cases: dict[str, list[Any]] = {}
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        for name, needs in (schema.get(key) or {}).items():
            if isinstance(needs, list):
                needs = {"required": needs}
            cases.setdefault(name, []).append(needs)
    closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    required = required_names(schema)
    conditions: list[Any] = []
    for name, needs in cases.items():
        if closed and name not in schema.get("properties", {}):
            continue
        for need in needs:
            only = isinstance(need, Mapping) and set(need) == {"required"}
            if only and required_names(need) <= required:
                continue
            absent = {"properties": {name: False}}
            conditions.append(need if name in required else {"anyOf": [absent, need]})
    if not cases or len(conditions) > MAX_DEPENDENCIES:
        return schema
    unwanted = ("dependentRequired", "dependentSchemas", "dependencies")
    result = {key: value for key, value in schema.items() if key not in unwanted}
    if conditions:
        result["allOf"] = [*result.get("allOf", []), *conditions]
    return result


def _simplify_condition(schema: dict[str, Any], root: object) -> dict[str, Any]:
    """Replace `if`, `then` and `else`."""
    parts = {key: schema[key] for key in ("if", "then", "else") if key in schema}
    if not parts:
        return schema
    result = {key: value for key, value in schema.items() if key not in parts}
    if "if" not in parts or len(parts) == 1:
        return result
    then, other = parts.get("then", True), parts.get("else", True)
    if _is_everything(parts["if"]) or (_is_everything(then) and _is_everything(other)):
        return {**result, "allOf": [*result.get("allOf", []), then]}
    negations = negate(parts["if"], result, root)
    if not negations:
        return schema
    cases = [{"allOf": [parts["if"], then]}]
    cases += [{"allOf": [one, other]} for one in negations]
    return {**result, "allOf": [*result.get("allOf", []), {"anyOf": cases}]}
