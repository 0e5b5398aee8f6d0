"""Pages of docs/ that a tool writes completely or in part: tables, rewriting, checking."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from tools.workspace import ROOT


def heading(*cells: str) -> list[str]:
    """The first two lines of a table."""
    return [row(*cells), "| --- " * len(cells) + "|"]


def row(*cells: str) -> str:
    """One line of a table."""
    return f"| {' | '.join(cells)} |"


def main(tool: str, path: Path, page: Callable[[], str]) -> int:
    """Write or check a page: the function of `python -m tools.<tool> [--check]`.

    Args:
        tool: Name of the module in `tools`.
        path: Path of the page.
        page: Returns the new text.

    Returns:
        The exit code: 1 if the checked page is outdated.
    """
    parser = argparse.ArgumentParser(prog=f"python -m tools.{tool}")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if out of date")
    text = page()
    if not parser.parse_args().check:
        path.write_text(text, encoding="utf-8")
        return 0
    if path.read_text(encoding="utf-8") == text:
        return 0
    name = path.relative_to(ROOT).as_posix()
    print(f"{name} is out of date: run `uv run python -m tools.{tool}`")
    return 1
