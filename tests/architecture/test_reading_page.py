"""Every file and name of docs/reading.md exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tools.workspace import ROOT

TEXT = (ROOT / "docs/reading.md").read_text("utf-8")
FILE = re.compile(r"`((?:ed_\w+|packages|examples|tests)/[\w/.-]+\.\w+)`")
#: A file, a colon, and the names to read in the file.
STOP = re.compile(r"`(ed_\w+/[\w/]+\.py)`:\s+((?:`[\w.]+`(?:,\s+)?)+)")


def located(path: str) -> Path:
    """Return a file of the page."""
    if not path.startswith("ed_"):
        return ROOT / path
    package = path.split("/")[0].replace("_", "-")
    return ROOT / "packages" / package / "src" / path


def defined(file: Path) -> set[str]:
    """Return functions, classes, methods and assigned names of a module."""
    found: set[str] = set()
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            members = [
                m for m in node.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
            found |= {f"{node.name}.{member.name}" for member in members}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize("path", sorted(set(FILE.findall(TEXT))))
def test_file_of_the_reading_page_exists(path: str) -> None:
    assert located(path).is_file(), path


@pytest.mark.parametrize(("path", "names"), STOP.findall(TEXT))
def test_names_of_the_reading_page_are_defined(path: str, names: str) -> None:
    missing = set(re.findall(r"`([\w.]+)`", names)) - defined(located(path))
    assert not missing, f"{path} does not define {sorted(missing)}"


def test_reading_page_follows_both_routes_in_about_200_lines() -> None:
    stops = STOP.findall(TEXT)
    packages = {path.split("/")[0] for path, _ in stops}
    assert packages == {path.parent.name for path in ROOT.glob("packages/*/src/ed_*/__init__.py")}
    assert 150 <= len(TEXT.splitlines()) <= 250
    assert len(stops) >= 35
