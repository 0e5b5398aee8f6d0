"""Write the tables of flags in docs/migrate/vllm.md and docs/migrate/llama_cpp.md.

uv run python -m tools.flag_table            rewrite the tables
uv run python -m tools.flag_table --check    exit 1 if a table is outdated
"""

from __future__ import annotations

import sys
from pathlib import Path

from ed_esurge.command.foreign_flag import LLAMA_CPP, VLLM, ForeignFlag
from ed_esurge.command.foreign_flags import FOREIGN_FLAGS

from tools import pages
from tools.pages import heading, row
from tools.workspace import ROOT

#: Page -> the program whose flags it lists.
PAGES = {ROOT / "docs/migrate/vllm.md": VLLM, ROOT / "docs/migrate/llama_cpp.md": LLAMA_CPP}
BEGIN, END = "<!-- tools/flag_table.py -->\n", "<!-- end -->\n"


def describe(flag: ForeignFlag) -> str:
    """Return what a flag means here."""
    parts = []
    omitted = [value for value, here in flag.values.items() if not here]
    if flag.target:
        parts.append(f"`{flag.target}{f' {flag.value}' * flag.is_switch * bool(flag.value)}`")
    replaced = [f"`{value}` = `{here}`" for value, here in flag.values.items() if here != value]
    if flag.target and replaced:
        values = [text for text in replaced if not text.endswith("``")]
        parts += [f"with {', '.join(values)}"] if values else []
    if omitted:
        reason = f": {flag.note}" if flag.note else ""
        parts.append(f"{', '.join(f'`{value}`' for value in omitted)} without effect{reason}")
    elif flag.note and not (flag.target or flag.refusal):
        parts.append(f"without effect: {flag.note}")
    if flag.unless:
        parts.append(f"not beside {', '.join(f'`{one}`' for one in flag.unless)}")
    if flag.refusal:
        parts.append(f"refused: {flag.refusal}")
    return "; ".join(parts).replace("|", "\\|")


def table(program: str) -> str:
    """Return the table of the flags of a program."""
    lines = heading(f"flag of {program}", "here")
    for flag in FOREIGN_FLAGS:
        if flag.program == program:
            lines.append(row(", ".join(f"`{name}`" for name in flag.names), describe(flag)))
    return "\n".join(lines) + "\n"


def page(path: Path) -> str:
    """Return the page with a new table."""
    text = path.read_text(encoding="utf-8")
    return pages.with_part(text, BEGIN, END, table(PAGES[path]))


if __name__ == "__main__":
    sys.exit(pages.main("flag_table", [*PAGES], page))
