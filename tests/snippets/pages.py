"""Code blocks of the documentation: what is run, and how a block says that it is not.

The fence's info string says it, where GitHub shows nothing of it:

    ```python                        run
    ```python nightly                run by the nightly suite only
    ```bash skip="needs a TPU"       not run; the reason is shown with the skipped test
    ```yaml                          validated as a run file; `actions` may be absent
    ```text                          any other language is not code

The python blocks of one page run in one process from top to bottom, as one reads them; so do its
bash blocks, in the same folder.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n`]+)\n(?P<body>.*?)^(?P=indent)```[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
RUNNABLE = ("bash", "python", "yaml")
FLAGS = {"nightly"}


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        page: file it stands in.
        line: number of its first line of code.
        language: first word of the info string.
        body: the code.
        flags: bare words of the info string.
        skip: why it is not run (None: it is).
    """

    page: Path
    line: int
    language: str
    body: str
    flags: frozenset[str] = field(default_factory=frozenset)
    skip: str | None = None


def blocks(page: Path) -> list[Block]:
    """The runnable blocks of a markdown file.

    Raises:
        ValueError: an info string has a word that means nothing, or a skip without a reason.
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


def joined(chosen: list[Block]) -> str:
    """Blocks of one page as one program whose line numbers are the page's."""
    rows: list[str] = []
    for block in chosen:
        rows += [""] * (block.line - 1 - len(rows))
        rows += block.body.splitlines()
    return "\n".join(rows) + "\n"
