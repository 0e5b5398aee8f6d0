"""Parsing of YAML and JSON files to plain values with line and column of each value.

PyYAML's loader discards locations, accepts duplicate keys, and parses `2e-5` as a string, `on` as
true and `1:30` as 90 (YAML 1.1). This loader keeps line and column of each key and value, rejects
duplicate keys, and follows the YAML 1.2 core schema.
"""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from yaml.parser import Parser
from yaml.reader import Reader, ReaderError
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

from ed_elarge.config.layers import resolve_includes
from ed_elarge.errors import Document, InputError, Problem, Span, ValuePath

_MAX_DEPTH = 64
"""Maximum number of nested levels; the options of this project need fewer than ten."""
_MAX_BYTES = 2**20
"""Maximum size of a file; run files have a few kilobytes."""
MAX_INCLUDES = 64
"""Maximum number of paths in the `include` keys of a run file and its included files."""
MAX_VALUES = 100_000
"""Maximum number of values after expansion of aliases, which bounds nested aliases."""

_CORE = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
# The text of a default ends before the next variable, so that the search is linear.
_VARIABLE = re.compile(r"\$\{env:([A-Za-z_]\w*)(:-(?:[^}$]|\$(?!\{))*)?\}")
_SCALARS = (
    ("null", re.compile(r"~|null|Null|NULL|"), [*"~nN", ""]),
    ("bool", re.compile(r"true|True|TRUE|false|False|FALSE"), [*"tTfF"]),
    ("int", _INT, [*"-+0123456789"]),
    ("float", _FLOAT, [*"-+.0123456789"]),
    ("merge", re.compile(r"<<"), ["<"]),
)


def read_yaml(path: str | Path) -> Document:
    """Read a YAML or JSON file (JSON is parsed as YAML) and the files of its key `include`.

    Raises:
        InputError: A file is missing, is not UTF-8 text or valid YAML, repeats a key, or includes
            itself.
    """
    return _Reading().read(Path(path), ())


class _Reading:
    """One run file and its included files; each file is read once."""

    def __init__(self) -> None:
        self._documents: dict[Path, Document] = {}
        self._includes = 0

    def read(self, path: Path, above: tuple[Path, ...]) -> Document:
        """Read a file that the files `above` include."""
        name, resolved_path = str(path), path.resolve()
        if resolved_path in above:
            files = " -> ".join(file.name for file in (*above, resolved_path))
            raise InputError(name, [Problem((), f"the file includes itself: {files}")])
        self._includes += bool(above)
        if self._includes > MAX_INCLUDES:
            message = f"the file and its includes have more than {MAX_INCLUDES} paths in include"
            raise InputError(name, [Problem((), f"{message}: join the files")])
        if resolved_path not in self._documents:
            document = _read_file(path)
            self._documents[resolved_path] = resolve_includes(
                document, partial(self.read, above=(*above, resolved_path))
            )
        return self._documents[resolved_path]


def _read_file(path: Path) -> Document:
    """Read a file without its includes."""
    name = str(path)
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
        if len(raw) > _MAX_BYTES:
            message = f"has more than {_MAX_BYTES:,} bytes: a run file contains options, not data"
            raise InputError(name, [Problem((), message)])
        return parse_yaml(raw.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n"), name)
    except UnicodeDecodeError as error:
        message = f"is not UTF-8 text (byte {error.start})"
    except FileNotFoundError:
        yaml_files = (
            sorted(p.name for p in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        )
        message = "no such file" + (
            f" (YAML files there: {', '.join(yaml_files[:8])})" if yaml_files else ""
        )
    except IsADirectoryError:
        message = "is a directory; give a YAML file"
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
    raise InputError(name, [Problem((), message)])


def parse_yaml(text: str, name: str = "<text>") -> Document:
    """Parse YAML text; see `read_yaml`."""
    document = Document(name, text)
    try:
        node = _Loader(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        raise InputError(document, [_syntax_problem(error, document)]) from error
    except ReaderError as error:
        line = text.count("\n", 0, error.position)
        column = error.position - (text.rfind("\n", 0, error.position) + 1)
        document.values[("",)] = Span(line, column, column + 1)
        message = f"the character {chr(error.character)!r} is not allowed in YAML"
        raise InputError(document, [Problem(("",), message)]) from error
    if node is None:
        return document
    builder = _Builder(document)
    document.value = builder.build(node, ())
    if builder.problems:
        raise InputError(document, builder.problems)
    return document


class _CoreResolver(BaseResolver):
    """Implicit types of the YAML 1.2 core schema, plus merge keys."""


for _tag, _regexp, _first in _SCALARS:
    _CoreResolver.add_implicit_resolver(
        _CORE + _tag, re.compile(rf"(?:{_regexp.pattern})\Z"), _first
    )


class _Loader(Reader, Scanner, Parser, Composer, _CoreResolver):
    depth = 0

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        _CoreResolver.__init__(self)

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        """Compose one node; raise an input error for deep nesting instead of `RecursionError`."""
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            message = f"values are nested more than {_MAX_DEPTH} levels deep"
            raise yaml.MarkedYAMLError(problem=message, problem_mark=self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _syntax_problem(error: yaml.MarkedYAMLError, document: Document) -> Problem:
    """Convert PyYAML's error to a located problem; tabs have a separate message."""
    mark = error.problem_mark or error.context_mark
    context, problem = error.context or "", error.problem or ""
    joint = " " if problem.startswith("but ") else ": "
    message = f"not valid YAML: {joint.join(part for part in (context, problem) if part)}"
    if "\\t" in message:
        message = "not valid YAML: the indentation contains a tab; YAML requires spaces"
    if mark is not None:
        document.values[("",)] = Span(mark.line, mark.column, mark.column + 1)
    return Problem(("",), message)


class _Builder:
    """Converts the node graph to values, locations and problems."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.problems: list[Problem] = []
        self._merges: dict[int, dict[Any, tuple[Node, Node]]] = {}  # by mapping; keys to nodes
        self._steps = 0
        self._open: list[Node] = []  # ancestors of the current node; an alias to one is a cycle

    def build(self, node: Node, path: ValuePath) -> Any:
        self.document.values[path] = self._span(node)
        if len(self.document.values) > MAX_VALUES:
            message = f"aliases make more than {MAX_VALUES:,} values of this file"
            raise InputError(self.document, [Problem(path[:1], message)])
        if len(path) > _MAX_DEPTH:
            message = f"aliases nest values more than {_MAX_DEPTH} levels deep"
            raise InputError(self.document, [Problem(path[:1], message)])
        if any(node is parent for parent in self._open):
            self.problems.append(
                Problem(path, "an alias (*name) refers to a node that contains it")
            )
            return None
        if isinstance(node, ScalarNode):
            return self._scalar(self._fill_variables(node, path), path)
        if node.tag not in (_CORE + "seq", _CORE + "map"):
            self.problems.append(Problem(path, f"the YAML tag {node.tag!r} is not supported"))
            return None
        self._open.append(node)
        try:
            if isinstance(node, SequenceNode):
                return [self.build(item, (*path, i)) for i, item in enumerate(node.value)]
            assert isinstance(node, MappingNode)
            return self._mapping(node, path)
        finally:
            self._open.pop()

    def _mapping(self, node: MappingNode, path: ValuePath) -> dict[Any, Any]:
        out: dict[Any, Any] = {}
        first: dict[Any, Span] = {}
        merged: dict[Any, tuple[Node, Node]] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _CORE + "merge":
                self._merge(value_node, path, merged)
                continue
            key = self._key(key_node, path)
            key_path = (*path, key)
            if key in first:
                self.document.keys[key_path] = self._span(key_node)
                message = f"duplicate key {key!r} (first given on line {first[key].line + 1})"
                self.problems.append(Problem(key_path, message, on_key=True))
                continue
            first[key] = self.document.keys[key_path] = self._span(key_node)
            out[key] = self.build(value_node, key_path)
        for key, (key_node, value_node) in merged.items():
            if key not in out:
                self.document.keys[(*path, key)] = self._span(key_node)
                out[key] = self.build(value_node, (*path, key))
        return out

    def _merge(self, node: Node, path: ValuePath, into: dict[Any, tuple[Node, Node]]) -> None:
        """Add the keys that `<<: *anchor` merges; in a list, earlier mappings have precedence."""
        for source in node.value if isinstance(node, SequenceNode) else [node]:
            if not isinstance(source, MappingNode):
                self.document.values[(*path, "<<")] = self._span(source)
                self.problems.append(Problem((*path, "<<"), "<< needs a mapping to merge"))
                continue
            for key, nodes in self._merged_keys(source, path).items():
                self._count_step(path)
                into.setdefault(key, nodes)

    def _merged_keys(self, source: MappingNode, path: ValuePath) -> dict[Any, tuple[Node, Node]]:
        """Return the keys of a mapping with those that it merges; each mapping is read once."""
        stored_keys = self._merges.get(id(source))
        if stored_keys is not None:
            return stored_keys
        if any(source is parent for parent in self._open):
            message = "an alias (*name) refers to a node that contains it"
            self.problems.append(Problem((*path, "<<"), message))
            return {}
        keys: dict[Any, tuple[Node, Node]] = {}
        below: dict[Any, tuple[Node, Node]] = {}
        self._open.append(source)
        if len(self._open) > _MAX_DEPTH:
            message = f"<< merges mappings more than {_MAX_DEPTH} levels deep"
            raise InputError(self.document, [Problem(path[:1], message)])
        for key_node, value_node in source.value:
            self._count_step(path)
            if key_node.tag == _CORE + "merge":
                self._merge(value_node, path, below)
            else:
                keys.setdefault(self._key(key_node, path), (key_node, value_node))
        self._open.pop()
        self._merges[id(source)] = {**below, **keys}
        return self._merges[id(source)]

    def _count_step(self, path: ValuePath) -> None:
        self._steps += 1
        if self._steps > MAX_VALUES:
            message = f"<< merges more than {MAX_VALUES:,} values of this file"
            raise InputError(self.document, [Problem(path[:1], message)])

    def _key(self, node: Node, path: ValuePath) -> Any:
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        self.document.keys[(*path, "")] = self._span(node)
        self.document.values[(*path, "")] = self._span(node)
        self.problems.append(Problem((*path, ""), "a key must be plain text", on_key=True))
        return ""

    def _scalar(self, node: ScalarNode, path: ValuePath) -> Any:
        tag, text = node.tag.removeprefix(_CORE), node.value
        try:
            match tag:
                case "str":  # JSON writes characters such as emojis as pairs of surrogates
                    return text.encode("utf-16", "surrogatepass").decode("utf-16")
                case "null":
                    return None
                case "bool":
                    return text.lower() == "true"
                case "int":
                    return int(text.replace("_", ""), 0 if text[:2] in ("0x", "0o") else 10)
                case "float":
                    return float(re.sub(r"\.(?=inf|nan)", "", text.lower().replace("_", "")))
        except ValueError:
            kind = "text: it has half of a pair of surrogates" if tag == "str" else tag
            self.problems.append(Problem(path, f"{text!r} is not a valid {kind}"))
            return None
        self.problems.append(Problem(path, f"the YAML tag {node.tag!r} is not supported"))
        return None

    def _fill_variables(self, node: ScalarNode, path: ValuePath) -> ScalarNode:
        """Replace `${env:NAME}` and `${env:NAME:-default}` by the value of a variable.

        A plain scalar gets the type of its new text; a quoted scalar stays text.
        """
        if "${env:" not in node.value:
            return node
        missing = [
            n for n, default in _VARIABLE.findall(node.value) if n not in os.environ and not default
        ]
        if missing:
            message = f"the environment variable {missing[0]} is not set: set it, or write " + (
                f"${{env:{missing[0]}:-default}}"
            )
            self.problems.append(Problem(path, message))
        text = _VARIABLE.sub(lambda m: os.environ.get(m[1], (m[2] or "")[2:]), node.value)
        tag = node.tag
        if node.style is None and tag == _CORE + "str":
            tag = _CoreResolver().resolve(ScalarNode, text, (True, False))
        return ScalarNode(tag, text, node.start_mark, node.end_mark, style=node.style)

    @staticmethod
    def _span(node: Node) -> Span:
        start, end = node.start_mark, node.end_mark
        same_line = end.line == start.line and end.column > start.column
        return Span(start.line, start.column, end.column if same_line else start.column + 1)
