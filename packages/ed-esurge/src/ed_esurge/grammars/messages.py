"""Messages about grammars that cannot be compiled, without the internals of llguidance."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ed_esurge.grammars.limits import resolve_pointer

TOO_COMPLEX = (
    "the grammar is too complex: matching it exceeds the limits of one step. Use fewer "
    "alternatives, smaller repetition counts, and no rule that can be read in several ways."
)
UNSATISFIABLE = "no text satisfies the grammar: a rule refers to itself without an end"

# Prefixes of llguidance's messages about schemas, and the advice for each.
_SCHEMA = (
    (
        r"oneOf constraints are not supported.*",
        "`oneOf` is supported only where no value can match two of its alternatives. Use `anyOf`, "
        "or give each alternative a property with a `const` of its own.",
    ),
    (
        r"Unimplemented keys: \[(?P<a>.*)\]",
        "the keywords {a} are not supported. Remove them, and check the answer for them.",
    ),
    (
        r"(?:Definition not found|Reference segment|Only absolute|Pointer '|Resource ').*",
        "the reference cannot be resolved. Use the form #/$defs/NAME, with NAME in `$defs`.",
    ),
    (
        r"circular references with sibling keys are not supported.*",
        "a schema that refers to itself cannot have other keywords next to `$ref`. Move them into "
        "the schema that `$ref` names.",
    ),
    (
        r"Invalid type: (?P<a>.*)",
        "the type {a!r} is unknown. Use object, array, string, number, integer, boolean or null.",
    ),
    (
        r"Unknown format: (?P<a>.*)",
        "the format {a!r} is unknown. Remove `format`, or use `pattern`.",
    ),
    (r"Unsatisfiable schema: (?P<a>.*)", "no value satisfies the schema: {a}"),
    (
        r"Failed to generate regex for \w+ range.*",
        "the range of numbers is not supported. Use bounds of fewer digits, or none.",
    ),
    (
        r"(?:schema too large|Schema intersection stack level exceeded).*",
        "the schema is too large. Use fewer combinations of `allOf` and `anyOf`.",
    ),
)
_COMPLEX = re.compile(r"fuel|limit|too many|too big|precomputation|Current row|too complex", re.I)

# Keywords with a schema, a list of schemas, and a mapping of schemas as value.
_ONE = ("items", "additionalProperties", "not", "if", "then", "else", "contains")
_MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties")


def translate_error(kind: str, said: str) -> str:
    """Convert an error message of llguidance to a message for the sender of the grammar.

    Args:
        kind: kind of the grammar; see `ed_esurge.grammars.build.GrammarSource`.
        said: error message of the matcher.
    """
    first = next((line.strip() for line in said.splitlines() if line.strip()), "")
    if kind == "json_schema":
        for pattern, message in _SCHEMA:
            hit = re.fullmatch(pattern, first)
            if hit is not None:
                return message.format(**hit.groupdict())
    if "NoExtension" in first:
        return UNSATISFIABLE
    if _COMPLEX.search(first):
        return TOO_COMPLEX
    if kind == "regex":
        hit = re.search(r"^error: (.*)$", said, re.MULTILINE)
        reason = first[:300] if hit is None else hit[1]
        return f"the regular expression is invalid: {reason}"
    name = "the JSON schema" if kind == "json_schema" else "the grammar"
    return f"{name} is invalid: {first[:300]}"


def locate_failure(schema: Mapping[str, Any], fails: Callable[[Any], bool]) -> str:
    """Return the JSON path of the innermost part of a schema that fails separately.

    Args:
        schema: the schema that fails.
        fails: function that returns whether a part fails, with the definitions of the schema.
    """
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    path, node, seen = "$", schema, {"$"}
    while True:
        for step, part in _parts(schema, node):
            part_path = step if step.startswith("$") else path + step
            standalone_schema = {**definitions, **part} if isinstance(part, dict) else part
            if part_path not in seen and fails(standalone_schema):
                seen.add(part_path)
                path, node = part_path, part
                break
        else:
            return path


def _parts(schema: object, node: object) -> Iterator[tuple[str, Any]]:
    """Yield the schemas inside a schema, each with its step of the path; `$…` is a full path."""
    if not isinstance(node, dict):
        return
    target = node.get("$ref")
    if isinstance(target, str) and len(node) <= 1 + ("$defs" in node) + ("definitions" in node):
        target_schema = resolve_pointer(schema, target)
        if target_schema is not None:
            yield "$" + target[1:].replace("/", "."), target_schema
        return
    for key in _NAMED:
        inside = node.get(key)
        if isinstance(inside, dict):
            yield from ((f".{key}.{name}", part) for name, part in inside.items())
    for key in _MANY:
        inside = node.get(key)
        if isinstance(inside, list):
            yield from ((f".{key}[{place}]", part) for place, part in enumerate(inside))
    for key in _ONE:
        if isinstance(node.get(key), dict):
            yield f".{key}", node[key]
