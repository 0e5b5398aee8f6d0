"""Keywords of one JSON schema that llguidance lacks: removed without effect, or replaced."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from ed_infra.errors import edits

from ed_esurge.grammars.limits import GrammarError
from ed_esurge.grammars.negation import (
    ANNOTATIONS,
    exclude,
    get_types,
    negate,
    other_texts,
    required_names,
    resolve_reference,
)

_COUNTS = ("Length", "Items", "Properties", "Contains")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_EXACT = 2**53
_APPLICATORS = (
    *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef"),
    *("dependentSchemas", "dependencies", "contains"),
)
_COUNTED = (*("minProperties", "maxProperties", "properties", "required", "additionalProperties"),)
#: Limit of the alternatives that replace one `minProperties` or `maxProperties`.
MAX_CHOICES = 64
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
_FORMATS: dict[str, str | None] = {
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
#: Formats that llguidance knows exactly.
_KNOWN = {"time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
_NAMES = {*_FORMATS, *_SAME, *_KNOWN}


def simplify_keywords(
    schema: dict[str, Any], root: object, path: str, rewrite: Callable[[object], Any]
) -> dict[str, Any]:
    """Return a schema that matches the same values, or fewer, with fewer keywords.

    Args:
        schema: the schema, with rewritten parts except for those of `not` and `if`.
        root: the schema that references are relative to.
        path: JSON path of the schema, for errors.
        rewrite: function that rewrites a schema.

    Raises:
        GrammarError: llguidance would match the schema wrongly.
    """
    result = dict(schema)
    for key, value in schema.items():
        if key[:3] in ("min", "max") and key[3:] in _COUNTS and isinstance(value, float):
            result[key] = int(value) if value.is_integer() else value
    _limit_bounds(result, path)
    _simplify_format(result, path)
    _simplify_unevaluated(result)
    _simplify_contains(result)
    _simplify_names(result, root)
    _merge_patterns(result)
    result = _simplify_dependencies(result)
    result = _simplify_condition(result, root, rewrite)
    if "not" in result:
        unwanted = result.pop("not")
        options = [rewrite(option) for option in negate(unwanted, result, root)]
        if not options and _is_everything(unwanted):
            options = [False]
        result = exclude(result, options) if options else {**result, "not": unwanted}
    return limit_properties(result)


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


def _simplify_format(schema: dict[str, Any], path: str) -> None:
    name = schema.get("format")
    if not isinstance(name, str):
        return
    if "string" not in get_types(schema):
        del schema["format"]
        return
    name = name.lower() if name.lower() in _NAMES else name
    schema["format"] = name = _SAME.get(name, name)
    if name in _KNOWN:
        return
    del schema["format"]
    if name not in _FORMATS:  # JSON Schema: an unknown format is an annotation
        most = 1 if len(name) < 6 else 2
        similar_names = [
            candidate
            for candidate in sorted(_NAMES)
            if len(name) < 30 and edits(name, candidate) <= most
        ]
        if similar_names:
            raise GrammarError(
                f"at {path}: the format {name!r} is unknown; did you mean {similar_names[0]!r}? "
                "Remove "
                "`format`, or use `pattern`."
            )
        return
    pattern = _FORMATS[name]
    if pattern is not None and "pattern" in schema:
        schema["allOf"] = [*schema.get("allOf", []), {"pattern": pattern}]
    elif pattern is not None:
        schema["pattern"] = pattern


def _is_everything(schema: object, kind: str | None = None) -> bool:
    """Return whether a schema matches every value, or every value of a type."""
    if not isinstance(schema, Mapping):
        return schema is True
    remaining_keys = set(schema) - ANNOTATIONS
    return not remaining_keys or (
        kind is not None and remaining_keys == {"type"} and kind in get_types(schema)
    )


def _simplify_unevaluated(schema: dict[str, Any]) -> None:
    for key, replacement_key in (
        ("unevaluatedProperties", "additionalProperties"),
        ("unevaluatedItems", ""),
    ):
        if key not in schema:
            continue
        if _is_everything(schema[key]):
            del schema[key]
        elif not any(name in schema for name in _APPLICATORS):
            value = schema.pop(key)
            schema.setdefault(replacement_key or "items", value)


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


def _simplify_names(schema: dict[str, Any], root: object) -> None:
    names = schema.get("propertyNames")
    if names is None:
        return
    if _is_everything(names, "string"):
        del schema["propertyNames"]
        return
    names = resolve_reference(names, root)
    if not isinstance(names, Mapping) or "patternProperties" in schema:
        return
    additional_schema = schema.get("additionalProperties", True)
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping) or not _are_texts(names):
        return
    listed = _list_texts(names, root)
    if listed is not None:
        schema["properties"] = {name: properties.get(name, additional_schema) for name in listed}
        schema["additionalProperties"] = False
    elif set(names) - ANNOTATIONS - {"type"} == {"not"}:
        if not _forbid_names(schema, resolve_reference(names["not"], root), root):
            return
    else:
        pattern = _make_name_pattern(names)
        if pattern is None or not (
            not properties or additional_schema is False or _is_everything(additional_schema)
        ):
            return
        schema["properties"] = {
            name: inner if re.search(pattern, name) else False for name, inner in properties.items()
        }
        schema["patternProperties"] = {pattern: additional_schema}
        schema["additionalProperties"] = False
    del schema["propertyNames"]


def _forbid_names(schema: dict[str, Any], names: object, root: object) -> bool:
    """Forbid the properties whose names match a schema; False = that is not possible."""
    if not isinstance(names, Mapping) or not _are_texts(names):
        return False
    listed = _list_texts(names, root)
    if listed is not None:
        schema["properties"] = {**schema.get("properties", {}), **dict.fromkeys(listed, False)}
        return True
    pattern = _make_name_pattern(names)
    if pattern is not None:
        schema["patternProperties"] = {pattern: False}
    return pattern is not None


def _make_name_pattern(names: Mapping[str, Any]) -> str | None:
    """Return the pattern of names; None if the schema of the names is no single pattern."""
    keys = set(names) - ANNOTATIONS - {"type"}
    if keys == {"pattern"} and isinstance(names["pattern"], str):
        try:
            return re.compile(names["pattern"]).pattern
        except (re.error, RecursionError, OverflowError):
            return None
    if keys and keys <= {"minLength", "maxLength"}:
        low, high = names.get("minLength", 0), names.get("maxLength", "")
        return f"^(.|\\n){{{low},{high}}}$"
    return None


def _are_texts(schema: Mapping[str, Any]) -> bool:
    return "type" not in schema or "string" in get_types(schema)


def _list_texts(schema: Mapping[str, Any], root: object) -> list[str] | None:
    """Return the texts of a schema that lists its values; None = the schema does not list them."""
    keys = set(schema) - ANNOTATIONS - {"type"}
    if keys == {"enum"} and isinstance(schema["enum"], list):
        return [name for name in schema["enum"] if isinstance(name, str)]
    if keys == {"const"}:
        return [schema["const"]] if isinstance(schema["const"], str) else []
    if keys in ({"oneOf"}, {"anyOf"}):
        members = [resolve_reference(member, root) for member in schema[keys.pop()]]
        lists = [_list_texts(member, root) for member in members if isinstance(member, Mapping)]
        if lists and len(lists) == len(members) and None not in lists:
            return [*dict.fromkeys(name for member in lists for name in member or ())]
    return None


def _merge_patterns(schema: dict[str, Any]) -> None:
    """Merge the patterns of single names with their properties, and patterns of equal schemas."""
    patterns, properties = schema.get("patternProperties"), schema.get("properties")
    if not isinstance(patterns, Mapping):
        return
    remaining_patterns, groups = dict(patterns), dict[str, list[str]]()
    if isinstance(properties, Mapping):
        merged = dict(properties)
        for pattern, inner in patterns.items():
            if re.fullmatch(r"\^[\w -]+\$", pattern) and (name := pattern[1:-1]) in properties:
                del remaining_patterns[pattern]
                if not _is_everything(inner) and inner != properties[name]:
                    merged[name] = {"allOf": [properties[name], inner]}
        schema["properties"] = merged
    for pattern, inner in remaining_patterns.items():
        groups.setdefault(json.dumps(inner, sort_keys=True), []).append(pattern)
    joined = {
        "|".join(f"({group_pattern})" for group_pattern in group)
        if len(group) > 1
        else group[0]: remaining_patterns[group[0]]
        for group in groups.values()
    }
    if joined:
        schema["patternProperties"] = joined
    else:
        del schema["patternProperties"]


def _simplify_dependencies(schema: dict[str, Any]) -> dict[str, Any]:
    cases: dict[str, list[Any]] = {}
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        listed = schema.get(key)
        for name, needs in listed.items() if isinstance(listed, Mapping) else ():
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


def _simplify_condition(
    schema: dict[str, Any], root: object, rewrite: Callable[[object], Any]
) -> dict[str, Any]:
    """Replace `if`, `then` and `else`."""
    parts = {key: schema[key] for key in ("if", "then", "else") if key in schema}
    if not parts:
        return schema
    result = {key: value for key, value in schema.items() if key not in parts}
    if "if" not in parts or len(parts) == 1:
        return result
    then_schema, else_schema = parts.get("then", True), parts.get("else", True)
    if _is_everything(parts["if"]) or (_is_everything(then_schema) and _is_everything(else_schema)):
        return {**result, "allOf": [*result.get("allOf", []), then_schema]}
    negations = [rewrite(option) for option in negate(parts["if"], result, root)]
    if not negations:
        return schema
    cases = [{"allOf": [rewrite(parts["if"]), then_schema]}]
    cases += [{"allOf": [one, else_schema]} for one in negations]
    return {**result, "allOf": [*result.get("allOf", []), {"anyOf": cases}]}


# ---- minProperties and maxProperties


def limit_properties(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace limits of the number of properties, which llguidance counts only without optional
    properties: one alternative for each choice of the optional properties."""
    low, high = schema.get("minProperties", 0), schema.get("maxProperties")
    properties, required = schema.get("properties", {}), required_names(schema)
    optional = [name for name in properties if name not in required]
    numbers = isinstance(low, int) and (high is None or isinstance(high, int))
    if not optional or not numbers or "patternProperties" in schema or (not low and high is None):
        return schema
    base = {key: value for key, value in schema.items() if key not in _COUNTED}
    additional_schema = schema.get("additionalProperties", True)
    least = max(0, low - len(required))
    most = None if high is None else high - len(required)
    if least == 0 and (most is None or (additional_schema is False and most >= len(optional))):
        return {**base, **_pick(schema, "properties", "required", "additionalProperties")}
    choices: list[Any] = []
    for count in range(len(optional) + 1 if most is not None else min(least, len(optional)) + 1):
        if most is not None and count > most:
            break
        if additional_schema is False and count < least:
            continue
        for selected_names in itertools.combinations(optional, count):
            names = [name for name in properties if name in required or name in selected_names]
            names += [name for name in schema.get("required", ()) if name not in properties]
            if most is None and count == least:
                choices.append({"required": names, **_pick(schema, "additionalProperties")})
                choices[-1]["properties"] = properties
            else:
                choice_properties = {name: properties[name] for name in names if name in properties}
                choices.append({"properties": choice_properties, "required": names})
                choices[-1].update(_limit_others(schema, names, low, high))
            if len(choices) > MAX_CHOICES:
                return schema
    choices = [{"type": "object", **choice} for choice in choices]
    values = [kind for kind in sorted(get_types(schema)) if kind != "object"]
    choices += [{"type": values}] if values else []
    if "anyOf" in base:
        return {**base, "allOf": [*base.get("allOf", []), {"anyOf": choices or [False]}]}
    return {**base, "anyOf": choices or [False]}


def _limit_others(
    schema: Mapping[str, Any], names: list[str], low: int, high: int | None
) -> dict[str, Any]:
    """Return the keywords of the names that are no properties, if all shown ones are required."""
    additional_schema = schema.get("additionalProperties", True)
    if additional_schema is False:
        return {"additionalProperties": False}
    every = {*schema["properties"], *names}
    limits = {"minProperties": max(low, len(names)), "maxProperties": high}
    finite_limits = {key: value for key, value in limits.items() if value is not None}
    return {
        "patternProperties": {other_texts(every): additional_schema},
        "additionalProperties": False,
        **finite_limits,
    }


def _pick(schema: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: schema[key] for key in keys if key in schema}
