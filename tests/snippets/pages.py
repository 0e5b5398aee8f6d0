"""Code blocks of the documentation, and the markers that exclude a block from the tests.

The fence's info string contains the markers; GitHub does not display them:

    ```python                        executed
    ```python nightly                executed by the nightly suite only
    ```bash skip="needs a TPU"       not executed; the skipped test shows the reason
    ```yaml                          validated as a run file; `actions` may be absent
    ```text                          any other language is not code

The python blocks of one page run in one process from top to bottom. The bash blocks of a page run
in one shell, in the same folder.
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

FENCE = re.compile(
    # A block without an end is the rest of the page, as in Markdown.
    r"^(?P<indent> *)```(?P<info>[^\n`]+)\n(?P<body>.*?)(?:^(?P=indent)```[ \t]*$|\Z)",
    re.MULTILINE | re.DOTALL,
)
RUNNABLE = ("bash", "python", "yaml")
FLAGS = {"nightly"}


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        page: File of the block.
        line: Line number of the first line of code.
        language: First word of the info string.
        body: The code.
        flags: Words of the info string without a value.
        skip: Reason why the block is not executed, or None.
    """

    page: Path
    line: int
    language: str
    body: str
    flags: frozenset[str] = field(default_factory=frozenset)
    skip: str | None = None


def blocks(page: Path) -> list[Block]:
    """Return the runnable blocks of a markdown file.

    Raises:
        ValueError: An info string has an unknown word, or a skip without a reason.
    """
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        language, *words = shlex.split(match["info"])
        if language not in RUNNABLE:
            continue
        line = text.count("\n", 0, match.start("body")) + 1
        options = dict(word.split("=", 1) for word in words if "=" in word)
        flags = frozenset(word for word in words if "=" not in word)
        unknown = (flags - FLAGS) | (set(options) - {"skip"})
        if unknown or options.get("skip") == "":
            raise ValueError(f"{page}:{line}: ```{match['info']}: unknown {sorted(unknown)}")
        indent = match["indent"]
        body = "".join(row.removeprefix(indent) for row in match["body"].splitlines(True))
        found.append(Block(page, line, language, body, flags, options.get("skip")))
    return found


def executed_by(test: str, page: Path) -> list[Block]:
    """Return the blocks of a page that name a file of tests, which executes them."""
    return [block for block in blocks(page) if test in (block.skip or "")]


def create_environment(folder: Path) -> None:
    """Write `.venv/bin/activate`, which pages name, into a folder: the Python that runs now.

    The script also removes the simulated devices of tests.
    """
    script = folder / ".venv/bin/activate"
    script.parent.mkdir(parents=True)
    programs = shlex.quote(str(Path(sys.executable).parent))
    script.write_text(f"export PATH={programs}:$PATH XLA_FLAGS=\n", encoding="utf-8")


def joined(chosen: list[Block]) -> str:
    """Join the blocks of one page into one program that keeps the line numbers of the page."""
    rows: list[str] = []
    for block in chosen:
        rows += [""] * (block.line - 1 - len(rows))
        rows += block.body.splitlines()
    return "\n".join(rows) + "\n"
