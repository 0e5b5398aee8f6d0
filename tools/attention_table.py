"""Write the tables of docs/attention.md: what each attention mechanism reads, runs and can do.

uv run python -m tools.attention_table            rewrite them
uv run python -m tools.attention_table --check    exit 1 if they are not what it would write
"""

from __future__ import annotations

import argparse
import sys

from ed_infra.enums import MECHANISM_ALIASES
from ed_layers.attention import MECHANISMS
from ed_layers.attention.scoring import FEATURES

from tools.workspace import ROOT

PAGE = ROOT / "docs/attention.md"
BEGIN, END = "<!-- tools/attention_table.py -->\n", "<!-- end -->\n"


def tables() -> str:
    """What each mechanism is, and what it can do."""
    lines = ["| `attn_mechanism` | reads | kernels of its own | what it is |", "| --- " * 4 + "|"]
    for name, ability in MECHANISMS.items():
        aliases = [alias for alias, of in MECHANISM_ALIASES.items() if of == name]
        names = ", ".join(f"`{n}`" for n in (name, *aliases))
        kernels = ", ".join(f"{platform}: {language}" for platform, language in ability.kernels)
        lines.append(f"| {names} | {ability.reads} | {kernels} | {ability.doc} |")
    lines += ["", f"| | {' | '.join(FEATURES)} |", "| --- " * (len(FEATURES) + 1) + "|"]
    for name, ability in MECHANISMS.items():
        cells = ("yes" if feature in ability.features else "" for feature in FEATURES)
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The page with its tables as they should be."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + tables() + END + rest.split(END)[1]


def main() -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if out of date")
    text = PAGE.read_text(encoding="utf-8")
    if not parser.parse_args().check:
        PAGE.write_text(page(text), encoding="utf-8")
        return 0
    if page(text) == text:
        return 0
    print("docs/attention.md is out of date: run `uv run python -m tools.attention_table`")
    return 1


if __name__ == "__main__":
    sys.exit(main())
