"""Write the tables of docs/attention.md: mechanisms, their features, and their kernels.

uv run python -m tools.attention_table            rewrite them
uv run python -m tools.attention_table --check    exit 1 if the tables are outdated
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from ed_infra.enums import MECHANISM_ALIASES
from ed_layers.attention import MECHANISMS, Kernel
from ed_layers.attention.kernels import built_in
from ed_layers.attention.scoring import FEATURES

from tools import pages
from tools.pages import heading, row
from tools.workspace import ROOT

PAGE = ROOT / "docs/attention.md"
BEGIN, END = "<!-- tools/attention_table.py -->\n", "<!-- end -->\n"


def tables(kernels: Iterable[Kernel[Any]] | None = None) -> str:
    """Return the tables of mechanisms, features and kernels."""
    lines = heading("`attn_mechanism`", "reads", "description")
    for name, ability in MECHANISMS.items():
        aliases = [alias for alias, of in MECHANISM_ALIASES.items() if of == name]
        lines.append(row(", ".join(f"`{n}`" for n in (name, *aliases)), ability.reads, ability.doc))
    lines += ["", *heading("", *FEATURES)]
    for name, ability in MECHANISMS.items():
        cells = ("yes" if feature in ability.features else "" for feature in FEATURES)
        lines.append(row(f"`{name}`", *cells))
    lines += ["", *heading("kernel", "of", "platform", "language", "does not support")]
    for kernel in built_in() if kernels is None else kernels:
        if kernel.platform is not None:
            lacks = ", ".join(feature for feature in FEATURES if feature in kernel.lacks)
            name = f"`{kernel.mechanism}`"
            lines.append(row(kernel.title, name, kernel.platform, kernel.language, lacks))
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """Return the page with new tables."""
    return pages.with_part(text, BEGIN, END, tables())


if __name__ == "__main__":
    sys.exit(pages.main("attention_table", PAGE, lambda: page(PAGE.read_text(encoding="utf-8"))))
