"""Write the line counts and the times of the two routes in docs/reading.md.

uv run python -m tools.reading_page          # write
uv run python -m tools.reading_page --check  # exit code 1 if the page is outdated
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tools import pages
from tools.workspace import ROOT

PAGE = ROOT / "docs/reading.md"
LINES_PER_MINUTE = 25
#: A file, a colon, the names to read in the file, and the sum of their lines.
STOP = re.compile(r"^`(ed_\w+/[\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+) \((\d+) lines\)$", re.MULTILINE)
#: The lines and the minutes of a route.
TOTAL = re.compile(r"^(\d+) lines: about (\d+) minutes\.$", re.MULTILINE)


def locate_file(path: str) -> Path:
    """Return the file of a path that starts with an import package."""
    return ROOT / "packages" / path.split("/")[0].replace("_", "-") / "src" / path


def measure_definitions(file: Path) -> dict[str, int]:
    """Return the number of lines of each function, class and method of a module, by its name."""
    sizes: dict[str, int] = {}
    for node in ast.parse(file.read_text("utf-8")).body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        sizes[node.name] = count_lines(node)
        members = node.body if isinstance(node, ast.ClassDef) else []
        for member in members:
            if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                sizes[f"{node.name}.{member.name}"] = count_lines(member)
    return sizes


def count_lines(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    """Return the number of lines of a definition with its decorators."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    assert node.end_lineno is not None
    return node.end_lineno - first + 1


def measure_stop(path: str, names: str) -> int:
    """Return the sum of the lines of the names of a stop.

    Raises:
        ValueError: the file does not define a name.
    """
    sizes, listed = measure_definitions(locate_file(path)), re.findall(r"`([\w.]+)`", names)
    if missing := [name for name in listed if name not in sizes]:
        raise ValueError(
            f"docs/reading.md: {path} does not define {', '.join(missing)}: write the new name"
        )
    return sum(sizes[name] for name in listed)


def build_page(text: str) -> str:
    """Return the page with current numbers."""
    text = STOP.sub(
        lambda stop: f"`{stop[1]}`: {stop[2]} ({measure_stop(stop[1], stop[2])} lines)", text
    )
    head, *routes = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    for number, route in enumerate(routes):
        total = sum(int(lines) for _, _, lines in STOP.findall(route))
        minutes = round(total / LINES_PER_MINUTE)
        routes[number] = TOTAL.sub(f"{total} lines: about {minutes} minutes.", route)
    return "".join([head, *routes])


if __name__ == "__main__":
    raise SystemExit(pages.main("reading_page", PAGE, lambda: build_page(PAGE.read_text("utf-8"))))
