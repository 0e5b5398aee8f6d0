"""Limits of a grammar that are checked before llguidance reads the grammar.

llguidance compiles rules and schemas recursively. A long chain of references overflows the stack of
its thread, which ends the process. This module limits an upper bound of the recursion depth: the
sum of the rules' nesting along a chain of references. Mutually recursive rules count as one rule
with their total nesting.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Maximum levels of nesting along a chain of references, and maximum number of values in a schema.
MAX_DEPTH, MAX_SCHEMA_VALUES = 2048, 2**15
# Maximum nested parentheses of a regular expression; the parser of llguidance accepts 250.
MAX_REGEX_DEPTH = 200

Graph = Mapping[str, tuple[int, Sequence[str]]]
"""Name of a rule -> nesting of the rule, and the rules that it references."""


class GrammarError(ValueError):
    """A grammar that cannot be compiled. The message is for the sender of the grammar."""


def check_schema(text: str) -> Any:
    """Parse a JSON schema and check its depth and size.

    Raises:
        GrammarError: the text is not a JSON schema, or is too deep or too large.
    """
    try:
        schema = json.loads(text)
    except RecursionError:
        raise GrammarError(
            "the JSON schema is nested too deeply to be read: flatten the schema"
        ) from None
    except ValueError as error:
        raise GrammarError(f"the JSON schema is not valid JSON: {error}") from None
    if not isinstance(schema, dict):
        raise GrammarError("the JSON schema must be an object; {} allows every JSON value")
    _check_depth("the JSON schema", _schema_graph(schema))
    return schema


def check_lark(text: str) -> None:
    """Check the nesting of the rules of a grammar in Lark syntax.

    Raises:
        GrammarError: the rules are nested too deeply.
    """
    _check_depth("the grammar", _lark_graph(text))


def check_regex(text: str) -> None:
    """Check the nesting of the parentheses of a regular expression.

    Raises:
        GrammarError: the parentheses are nested too deeply.
    """
    depth = deepest = 0
    for bracket in re.findall(r"\\.|[()]", text, re.DOTALL):
        depth += (bracket == "(") - (bracket == ")")
        deepest = max(deepest, depth)
    if deepest > MAX_REGEX_DEPTH:
        raise GrammarError(
            f"the regular expression has {deepest} nested parentheses: {MAX_REGEX_DEPTH} are "
            "allowed"
        )


def compute_depth(graph: Graph) -> int:
    """Return an upper bound of the nesting along any chain of references."""
    total = 0
    through: dict[str, int] = {}
    for component in _components(graph):
        component_depth = sum(graph[name][0] for name in component)
        successors = {to for name in component for to in graph[name][1]} - component
        depth = component_depth + max((through.get(to, 0) for to in successors), default=0)
        through.update(dict.fromkeys(component, depth))
        total = max(total, depth)
    return total


def _check_depth(name: str, graph: Graph) -> None:
    depth = compute_depth(graph)
    if depth > MAX_DEPTH:
        raise GrammarError(
            f"{name} is nested {depth} levels deep along its references: {MAX_DEPTH} levels are "
            "allowed. Shorten the chain of references."
        )


def _schema_graph(schema: Mapping[str, Any]) -> Graph:
    """Return the rules of a schema: "#" for the schema, and one rule per target of a `$ref`.

    Raises:
        GrammarError: the schema has too many values.
    """
    depths: dict[str, int] = {}
    references: dict[str, list[str]] = {}
    todo: list[tuple[str, Any]] = [("#", schema)]
    values = 0
    while todo:
        name, value = todo.pop()
        if name in depths:
            continue
        depths[name], references[name] = 1, []
        inside: list[tuple[Any, int]] = [(value, 1)]
        while inside:
            node, depth = inside.pop()
            values += 1
            if values > MAX_SCHEMA_VALUES:
                raise GrammarError(
                    f"the JSON schema has more than {MAX_SCHEMA_VALUES} values along its "
                    "references: make the schema smaller"
                )
            if isinstance(node, dict | list):
                depths[name] = max(depths[name], depth)
            if isinstance(node, dict):
                target = node.get("$ref")
                if isinstance(target, str):
                    references[name].append(target)
                    todo.append((target, resolve_pointer(schema, target)))
                inside += [(child, depth + 1) for child in node.values()]
            elif isinstance(node, list):
                inside += [(child, depth + 1) for child in node]
    return {name: (depth, references[name]) for name, depth in depths.items()}


def resolve_pointer(schema: object, reference: str) -> Any:
    """Return the value that a JSON pointer of a schema names; None without such a value."""
    if not reference.startswith("#"):
        return None
    node = schema
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and key in node:
            node = node[key]
        elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return node


_LARK = re.compile(
    r"""
    (?P<skip> //[^\n]* | \#[^\n]* | "(?:\\.|[^"\\\n])*" | /(?:\\.|[^/\\\n])+/ )
    | (?:^|(?<=\n)) [ \t]* [?!]* (?P<rule>[A-Za-z_]\w*)
      (?= (?: ::\w+ | \.\d+ | \{[^}\n]*\} | \[[^\]\n]*\] )* [ \t]* :(?!:) )
    | (?P<name> [A-Za-z_]\w* )
    | (?P<bracket> [()\[\]{}] )
    """,
    re.VERBOSE | re.DOTALL,
)


def _lark_graph(text: str) -> Graph:
    """Return the rules and tokens of a Lark grammar. Other text is counted for "start"."""
    graph: dict[str, tuple[int, list[str]]] = {"start": (1, [])}
    current, depth = "start", 0
    for match in _LARK.finditer(text):
        if match["rule"]:
            current, depth = match["rule"], 0
            graph.setdefault(current, (1, []))
        elif match["name"]:
            graph[current][1].append(match["name"])
        elif match["bracket"]:
            depth = max(0, depth + (1 if match["bracket"] in "([{" else -1))
            deepest, names = graph[current]
            graph[current] = max(deepest, 1 + depth), names
    return {
        name: (depth, [to for to in names if to in graph]) for name, (depth, names) in graph.items()
    }


def _components(graph: Graph) -> Iterable[set[str]]:
    """Return the strongly connected components, each after those that it references (Tarjan)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    open_names: set[str] = set()
    for root in graph:
        if root in number:
            continue
        work = [(root, iter(graph[root][1]))]
        number[root] = lowest[root] = len(number)
        path.append(root)
        open_names.add(root)
        while work:
            name, targets = work[-1]
            for target in targets:
                if target not in number:
                    number[target] = lowest[target] = len(number)
                    path.append(target)
                    open_names.add(target)
                    work.append((target, iter(graph[target][1])))
                    break
                if target in open_names:
                    lowest[name] = min(lowest[name], number[target])
            else:
                work.pop()
                if work:
                    above = work[-1][0]
                    lowest[above] = min(lowest[above], lowest[name])
                if lowest[name] == number[name]:
                    component: set[str] = set()
                    while name not in component:
                        component.add(path.pop())
                    open_names -= component
                    yield component
