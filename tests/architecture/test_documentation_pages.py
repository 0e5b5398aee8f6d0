"""Pages about the code name existing files, folders and functions, and all links resolve."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import reading_page
from tools.workspace import ROOT, packages

PAGES = sorted(
    (
        *ROOT.glob("*.md"),
        *ROOT.glob(".github/*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("packages/*/*.md"),
    )
)
FILE = re.compile(r"`((?:ed_\w+|packages|examples|tests|tools)/[\w/.-]+\.\w+)(?:::\w+)?`")
FILES = {
    (page, path)
    for page in ("AGENTS.md", "docs/architecture.md", "docs/reading.md")
    for path in FILE.findall((ROOT / page).read_text("utf-8"))
}
#: Speeds and times of measurements.
MEASURED = re.compile(r"\d ?(?:ms|µs|(?:tokens|texts)(?:/s| per second)|GB/s)\b|\d times faster")
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s#]*)#?([^)\s]*)\)")


def located(path: str) -> Path:
    """Return a file of the page."""
    if not path.startswith("ed_"):
        return ROOT / path
    package = path.split("/")[0].replace("_", "-")
    return ROOT / "packages" / package / "src" / path


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


def test_reading_page_has_two_routes_of_twelve_stops_with_current_numbers() -> None:
    text = reading_page.PAGE.read_text("utf-8")
    _, *routes, _ = re.split(r"^## ", text, flags=re.MULTILINE)
    stops = [reading_page.STOP.findall(route) for route in routes]
    assert [len(route) for route in stops] == [12, 12]
    for route, text_of_route in zip(stops, routes, strict=True):
        headings = re.findall(r"^### (\d+)\. ", text_of_route, re.MULTILINE)
        assert headings == [str(number) for number in range(1, 13)]
        sizes = [reading_page.measure_stop(path, names) for path, names, _ in route]
        assert sizes == [int(lines) for _, _, lines in route], "run: python -m tools.reading_page"
        ((total, minutes),) = reading_page.TOTAL.findall(text_of_route)
        assert (int(total), int(minutes)) == (sum(sizes), round(sum(sizes) / 25))
    packages_read = {path.split("/")[0] for route in stops for path, _, _ in route}
    assert packages_read == {
        path.parent.name for path in ROOT.glob("packages/*/src/ed_*/__init__.py")
    }


def test_reading_page_with_a_missing_function_or_a_wrong_number_is_found() -> None:
    stop = "`ed_models/families/llama.py`: `LlamaModel` (1 lines)\n"
    route = f"## A route\n\n2 lines: about 3 minutes.\n\n{stop}"
    lines = reading_page.measure_stop("ed_models/families/llama.py", "`LlamaModel`")
    assert f"`LlamaModel` ({lines} lines)" in reading_page.build_page(route)
    assert f"{lines} lines: about" in reading_page.build_page(route)
    with pytest.raises(ValueError, match="does not define LostModel"):
        reading_page.build_page(route.replace("LlamaModel", "LostModel"))


@pytest.mark.parametrize("package", packages(), ids=lambda package: package.name)
def test_architecture_page_lists_the_folders_of_every_package(package) -> None:
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    section = page.split(f"### {package.name}\n")[1].split("\n### ")[0].split("\n## ")[0]
    listed = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    source = package.folder / "src" / package.name.replace("-", "_")
    assert listed == {file.parent.name for file in source.glob("*/__init__.py")}


def test_prose_outside_of_the_benchmarks_states_no_measured_figure() -> None:
    found = [
        f"{page.relative_to(ROOT)}: {row}"
        for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))
        if page.name != "benchmarks.md"
        for row in without_code(page).splitlines()
        if not row.startswith("|") and MEASURED.search(row)
    ]
    assert not found, "move the figure to a table of docs/benchmarks.md, and link to the table"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_of_a_page_resolve(page: Path) -> None:
    for path, anchor in LINK.findall(without_code(page)):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), f"{path}#{anchor}"
