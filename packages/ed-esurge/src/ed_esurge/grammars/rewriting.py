"""JSON schemas in terms of keywords that llguidance supports.

A rewritten schema is at most stricter than the original. If no such schema is found, the keyword
stays, and the compiler rejects the schema.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ed_esurge.grammars.keywords import simplify_keywords
from ed_esurge.grammars.negation import (
    TYPES,
    exclude,
    get_type,
    get_types,
    negate,
    required_names,
    resolve_reference,
)

#: Limit of the arrays that replace one `uniqueItems`, and of the alternatives of one `oneOf`.
MAX_ARRAYS, MAX_ALTERNATIVES = 330, 32
#: Limit of the negations inside negations.
MAX_NEGATIONS = 3
#: Limits of the pairs of alternatives that the compiler compares, and of their characters.
MAX_PAIRS, MAX_PAIR_SIZE = 32, 2**14
_OLD_DRAFTS = re.compile(r"json-schema\.org/draft-0[3467]/")
_INSIDE = (
    *("items", "additionalProperties", "then", "else", "contains"),
    *("additionalItems", "unevaluatedItems", "unevaluatedProperties"),
)
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
# The schemas of `not`, `if` and `oneOf` are negated as they are written: a rewritten schema may
# match fewer values, and its negation would match more.
_ASSERTIONS = {
    *("not", "if"),
    *(*_INSIDE, *_LISTS, "type", "enum", "const", "required", "properties", "patternProperties"),
    *("minLength", "maxLength", "pattern", "format", "minItems", "maxItems", "uniqueItems"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minProperties", "maxProperties", "propertyNames", "dependencies", "additionalItems"),
}
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def rewritten(text: str) -> str:
    """Return the text of a schema without keywords that llguidance lacks, where that is possible.

    Raises:
        GrammarError: llguidance would match a part of the schema wrongly; the message has its path.
    """
    try:
        schema = json.loads(text)
        return json.dumps(_rewritten(schema, schema, "$"))
    except RecursionError:  # the compiler has its own limit of levels
        return text


def _rewritten(schema: object, root: object, path: str, depth: int = 0) -> Any:
    """Return a rewritten part of a schema.

    Args:
        depth: number of negations that produced the part.
    """
    if not isinstance(schema, dict) or depth > MAX_NEGATIONS:
        return schema

    def rewrite(part: object) -> Any:
        return _rewritten(part, root, path, depth + 1)

    original_schema = result = dict(schema)
    if isinstance(result.get("$ref"), str) and _is_old_draft(root):
        # These drafts ignore all keywords beside a reference.
        result = {key: value for key, value in result.items() if key not in _ASSERTIONS}
        original_schema = dict(result)
    result = dict(result)
    for key in _INSIDE:
        if isinstance(result.get(key), dict):
            result[key] = _rewritten(result[key], root, f"{path}.{key}", depth)
    for key in (*_LISTS, "items"):
        if isinstance(result.get(key), list):
            result[key] = [
                _rewritten(one, root, f"{path}.{key}[{place}]", depth)
                for place, one in enumerate(result[key])
            ]
    for key in _NAMED:
        if isinstance(result.get(key), dict):
            result[key] = {
                name: _rewritten(one, root, f"{path}.{key}.{name}", depth)
                for name, one in result[key].items()
            }
    result = simplify_keywords(result, root, path, rewrite)
    if "uniqueItems" in result:
        result = _unique(result, root)
    if isinstance(result.get("oneOf"), list):
        alternatives = _separate_alternatives(original_schema, root, result["oneOf"], rewrite)
        if alternatives is not None:
            del result["oneOf"]
            if "anyOf" in result:
                result["allOf"] = [*result.get("allOf", []), {"anyOf": alternatives}]
            else:
                result["anyOf"] = alternatives
    return result


def _is_old_draft(root: object) -> bool:
    return isinstance(root, dict) and _OLD_DRAFTS.search(str(root.get("$schema"))) is not None


# ---- uniqueItems


def _unique(schema: dict[str, Any], root: object) -> dict[str, Any]:
    """Return a schema of an array without `uniqueItems`."""
    remaining_schema = {key: value for key, value in schema.items() if key != "uniqueItems"}
    if schema["uniqueItems"] is False:
        return remaining_schema
    low, high = schema.get("minItems", 0), schema.get("maxItems")
    if schema.get("type") != "array" or not isinstance(low, int):
        return schema
    if high is not None and isinstance(high, int) and high <= 1:
        return remaining_schema
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
    array_keys = ("type", "items", "minItems", "maxItems")
    other_keywords = {
        key: value for key, value in remaining_schema.items() if key not in array_keys
    }
    return (
        {**other_keywords, "anyOf": arrays or [False]} if "anyOf" not in other_keywords else schema
    )


def _values(schema: object, root: object) -> list[Any] | None:
    """Return the distinct values of a schema, if they are listed."""
    schema = resolve_reference(schema, root)
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
    allowed = get_types(schema) if kinds is not None else set(TYPES)
    if not set(schema) <= {"const", "enum", "type", "title", "description", "default"}:
        return None
    return [*{_key(value): value for value in listed if get_type(value) in allowed}.values()]


def _key(value: object) -> str:
    """Return a text that is equal for equal JSON values: 1 and 1.0 are equal, 1 and true not."""
    return json.dumps(_normalize_numbers(value), sort_keys=True)


def _normalize_numbers(value: object) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_normalize_numbers(one) for one in value]
    if isinstance(value, dict):
        return {key: _normalize_numbers(one) for key, one in value.items()}
    return value


# ---- oneOf


def _separate_alternatives(
    schema: Mapping[str, Any],
    root: object,
    options: Sequence[Any],
    rewrite: Callable[[object], Any],
) -> list[Any] | None:
    """Return alternatives of which a value never matches two; None if that is not possible.

    An alternative loses the values that another one also matches.

    Args:
        schema: the schema as it is written.
        options: the rewritten alternatives.
        rewrite: function that rewrites a schema.
    """
    if not 0 < len(options) <= MAX_ALTERNATIVES:
        return None
    alternatives = [resolve_reference(one, root) for one in schema["oneOf"]]
    if not all(isinstance(one, dict) for one in alternatives):
        return None
    lists = [_values(one, root) for one in alternatives]
    if all(one is not None for one in lists):
        every = [value for one in lists if one is not None for value in one]
        counts = Counter(map(_key, every))
        unique_values = [one for one in every if counts[_key(one)] == 1]
        return [{"enum": unique_values}] if unique_values else None
    # An alternative has the type and the required properties of the whole schema.
    if "type" in schema:
        alternatives = [
            one if "type" in one else {"type": schema["type"], **one} for one in alternatives
        ]
    required = required_names(schema)
    alternatives = [
        one
        if required <= required_names(one)
        else {
            **one,
            "required": [*one.get("required", ()), *sorted(required - required_names(one))],
        }
        for one in alternatives
    ]
    pairs = [*itertools.combinations(range(len(alternatives)), 2)]
    shared = [
        pair for pair in pairs if not _disjoint(alternatives[pair[0]], alternatives[pair[1]], root)
    ]
    base_schema = {key: value for key, value in schema.items() if key != "oneOf"}
    if len(shared) <= MAX_PAIRS:
        shared = [
            (one, rival)
            for one, rival in shared
            if not _is_unsatisfiable((base_schema, alternatives[one], alternatives[rival]), root)
        ]
    result: list[Any] = []
    for place, one in enumerate(alternatives):
        alternative: dict[str, Any] | None = one
        for pair in shared:
            if place not in pair or alternative is None:
                continue
            rival = alternatives[pair[1] if place == pair[0] else pair[0]]
            negations = negate(rival, alternative, root)
            alternative = exclude(alternative, negations) if negations else None
        if alternative is one:
            result.append(options[place])
        elif alternative is not None:
            result.append(rewrite(alternative))
    return result or None


def _disjoint(one: Mapping[str, Any], other_schema: Mapping[str, Any], root: object) -> bool:
    """Return whether no value matches both schemas."""
    if not get_types(one) & get_types(other_schema):
        return True
    values, other_values = _values(one, root), _values(other_schema, root)
    if values is not None and other_values is not None:
        return not set(map(_key, values)) & set(map(_key, other_values))
    if get_types(one) != {"object"} or get_types(other_schema) != {"object"}:
        return False
    if _is_closed(one) and required_names(other_schema) - _names(one):
        return True
    if _is_closed(other_schema) and required_names(one) - _names(other_schema):
        return True
    for name in required_names(one) & required_names(other_schema):
        left, right = (
            resolve_reference(x.get("properties", {}).get(name), root) for x in (one, other_schema)
        )
        if isinstance(left, dict) and isinstance(right, dict):
            a, b = _values(left, root), _values(right, root)
            if not get_types(left) & get_types(right):
                return True
            if None not in (a, b) and not set(map(_key, a or ())) & set(map(_key, b or ())):
                return True
    return False


def _is_unsatisfiable(schemas: Sequence[object], root: Any) -> bool:
    """Return whether the compiler finds that no value matches all schemas."""
    from llguidance import LLMatcher

    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    text = json.dumps({**definitions, "allOf": [*schemas]})
    if len(text) > MAX_PAIR_SIZE:
        return False
    try:
        error = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text))
    except ValueError:
        return False
    return error.startswith("Unsatisfiable schema")


def _is_closed(schema: Mapping[str, Any]) -> bool:
    return schema.get("additionalProperties") is False and not schema.get("patternProperties")


def _names(schema: Mapping[str, Any]) -> set[str]:
    properties = schema.get("properties")
    return set(properties) if isinstance(properties, Mapping) else set()
