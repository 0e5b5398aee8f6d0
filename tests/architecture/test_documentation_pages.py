"""Pages about the code name existing files, folders and functions, and all links resolve."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tools.workspace import ROOT, packages

PAGES = sorted(
    (
        *ROOT.glob("*.md"),
        *ROOT.glob(".github/*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("packages/*/*.md"),
    )
)
TEXT = (ROOT / "docs/reading.md").read_text("utf-8")
FILE = re.compile(r"`((?:ed_\w+|packages|examples|tests|tools)/[\w/.-]+\.\w+)(?:::\w+)?`")
FILES = {
    (page, path)
    for page in ("AGENTS.md", "docs/architecture.md", "docs/reading.md")
    for path in FILE.findall((ROOT / page).read_text("utf-8"))
}
#: A file, a colon, and the names to read in the file.
STOP = re.compile(r"`(ed_\w+/[\w/]+\.py)`:\s+((?:`[\w.]+`(?:,\s+)?)+)")
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s#]*)#?([^)\s]*)\)")


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


def without_code(page: Path) -> str:
    """Return the text of a page without its code blocks."""
    return re.sub(r"^ *```.*?^ *```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub creates for the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(("page", "path"), sorted(FILES))
def test_file_named_by_a_page_exists(page: str, path: str) -> None:
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


@pytest.mark.parametrize("package", packages(), ids=lambda package: package.name)
def test_architecture_page_lists_the_folders_of_every_package(package) -> None:
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    section = page.split(f"### {package.name}\n")[1].split("\n### ")[0].split("\n## ")[0]
    listed = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    source = package.folder / "src" / package.name.replace("-", "_")
    assert listed == {file.parent.name for file in source.glob("*/__init__.py")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_of_a_page_resolve(page: Path) -> None:
    for path, anchor in LINK.findall(without_code(page)):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), f"{path}#{anchor}"
