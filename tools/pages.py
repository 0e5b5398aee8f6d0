"""Markdown tables, and the command line of a tool that writes or checks a page of docs/."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.workspace import ROOT


def heading(*cells: str) -> list[str]:
    """Return the first two lines of a Markdown table."""
    return [row(*cells), "| --- " * len(cells) + "|"]


def row(*cells: str) -> str:
    """Return one line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def with_part(text: str, begin: str, end: str, part: str) -> str:
    """Return the text of a page with a new part between two marks."""
    before, rest = text.split(begin)
    return f"{before}{begin}{part}{end}{rest.split(end)[1]}"


def main(tool: str, path: Path | Sequence[Path], page: Callable[..., str]) -> int:
    """Write or check pages: the implementation of `python -m tools.<tool> [--check]`.

    Args:
        tool: Name of the module in `tools`.
        path: Path of the page, or of several pages.
        page: Function that returns the new text; for several pages, a function of the path.

    Returns:
        The exit code: 1 if a checked page is outdated.
    """
    parser = argparse.ArgumentParser(prog=f"python -m tools.{tool}")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if outdated")
    check = parser.parse_args().check
    texts = {path: page()} if isinstance(path, Path) else {one: page(one) for one in path}
    outdated = [one for one, text in texts.items() if one.read_text(encoding="utf-8") != text]
    for one in outdated:
        if check:
            name = one.relative_to(ROOT).as_posix()
            print(f"{name} is outdated: run `uv run python -m tools.{tool}`")
        else:
            one.write_text(texts[one], encoding="utf-8")
    return 1 if check and outdated else 0
