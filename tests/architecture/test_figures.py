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


def texts() -> dict[str, str]:
    return {
        module: text
        for package in packages()
        for module, text in figures.texts(package.folder / "src").items()
    }


def test_public_names_have_one_meaning() -> None:
    modules = {module: text for module, text in texts().items() if module.startswith("ed_")}
    assert figures.several_meanings(modules) == {}


def test_figures_of_the_packages_do_not_grow() -> None:
    sources = [figures.Source.of(text) for text in texts().values()]
    assert sum(source.any for source in sources) <= 842, "annotations `: Any`"
    assert sum(source.ignored for source in sources) <= 115, "comments `type: ignore`"
    assert sum(source.lines < 60 for source in sources) <= 258, "files below 60 lines"


def test_figures_table_has_a_row_with_every_column() -> None:
    cells = figures.row("all", [figures.Source.of(TEXT)] * 10, imported=3)
    assert len(cells) == len(figures.HEADER)
    assert cells[:3] == ["all", "10", "140"]
