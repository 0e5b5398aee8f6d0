"""Docstrings describe arguments and attributes that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tools.workspace import Package, packages

#: The line that begins a section of a docstring, with its indentation.
SECTION = re.compile(r"^( *)(Args|Attributes):$")
#: The names before a description: `name: …` or `one, other: …`.
NAMES = re.compile(r"^ *(\*{0,2}\w+(?:, \*{0,2}\w+)*): ")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
#: Bases that add no attribute to a class.
PLAIN_BASES = {"NamedTuple", "Protocol", "ABC", "Options"}


def read_names(docstring: str, section: str) -> Iterator[str]:
    """Yield the names that a section of a docstring describes."""
    outer = inner = -1
    for line in docstring.splitlines():
        depth = len(line) - len(line.lstrip())
        if begin := SECTION.match(line):
            outer, inner = (len(begin[1]), -1) if begin[2] == section else (-1, -1)
        elif outer >= 0 and line.strip():
            if depth <= outer:
                outer = -1
                continue
            inner = depth if inner < 0 else inner
            if depth == inner and (described := NAMES.match(line)):
                yield from re.findall(r"\w+", described[1])


def list_arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the names of all arguments of a function."""
    return {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}


def list_members(definition: ast.ClassDef) -> set[str]:
    """Return fields, methods, and attributes of `self`."""
    names = {node.name for node in definition.body if isinstance(node, Definition)}
    for node in ast.walk(definition):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    for node in definition.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def find_unknown_names(definition: Definition) -> set[str]:
    """Return the names in a docstring that its function or class does not have."""
    docstring = ast.get_docstring(definition) or ""
    if not isinstance(definition, ast.ClassDef):
        has_more = definition.args.kwarg is not None
        names = set() if has_more else {*read_names(docstring, "Args")}
        return names - list_arguments(definition)
    members = list_members(definition)
    created = [node for node in definition.body if getattr(node, "name", "") == "__init__"]
    arguments = set().union(*(list_arguments(node) for node in created)) | members
    is_plain = {ast.unparse(base).partition("[")[0] for base in definition.bases} <= PLAIN_BASES
    unknown = {*read_names(docstring, "Args")} - arguments if created or is_plain else set()
    return unknown | ({*read_names(docstring, "Attributes")} - members if is_plain else set())


@pytest.mark.parametrize("package", packages(), ids=lambda package: package.name)
def test_docstrings_describe_existing_arguments_and_attributes(package: Package) -> None:
    unknown = {
        f"{path.relative_to(package.folder)}:{node.lineno} {node.name}": names
        for path in (package.folder / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, Definition) and (names := find_unknown_names(node))
    }
    assert not unknown


def test_unknown_names_are_found() -> None:
    source = '''
def load(path, *, strict):
    """Load.

    Args:
        path, folder: where.
        strict: whether: to refuse.
            nested: text.

    Returns:
        text: of the file.
    """

class Point(NamedTuple):
    """A point.

    Attributes:
        x: one.
        z: none.
    """

    x: int
'''
    found = [
        find_unknown_names(node) for node in ast.parse(source).body if isinstance(node, Definition)
    ]
    assert found == [{"folder"}, {"z"}]
