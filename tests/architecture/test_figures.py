"""`tools.figures` counts lines, annotations and names correctly."""

from __future__ import annotations

from tools import figures
from tools.workspace import packages

TEXT = '''"""Docstring
of two lines."""

import os  # a comment


class Thing:
    """A docstring."""

    value: Any = os  # type: ignore
    """A docstring of an attribute."""

    text = """a string
of two lines"""
'''


def test_figures_count_code_without_docstrings_and_comments() -> None:
    assert figures.Source.of(TEXT) == figures.Source(lines=14, code=5, any=1, ignored=1)


def test_figures_find_names_with_different_definitions() -> None:
    modules = {"a": TEXT + "Row = int\n", "b": "Row = int\nclass Thing: ...\n", "c": "X = 1\n"}
    assert figures.several_meanings(modules) == {"Thing": ["a", "b"]}


def test_public_names_have_one_meaning() -> None:
    modules = {
        module: text
        for package in packages()
        for module, text in figures.texts(package.folder / "src").items()
        if module.startswith("ed_")
    }
    assert figures.several_meanings(modules) == {}


def test_figures_table_has_a_row_with_every_column() -> None:
    cells = figures.row("all", [figures.Source.of(TEXT)] * 10, imported=3)
    assert len(cells) == len(figures.HEADER)
    assert cells[:3] == ["all", "10", "140"]
