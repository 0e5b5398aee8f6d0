"""Write the tables of docs/gguf.md: architectures and formats of GGUF files.

uv run python -m tools.gguf_table            rewrite them
uv run python -m tools.gguf_table --check    exit 1 if the tables are outdated
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

from ed_models.checkpoints.gguf.blocks import readable_formats
from ed_models.checkpoints.gguf.header import formats
from ed_models.checkpoints.gguf.table import ROWS
from ed_models.checkpoints.gguf.writer import FILE_TYPES

from tools import pages
from tools.pages import heading, row
from tools.workspace import ROOT

PAGE = ROOT / "docs/gguf.md"
#: Differences from llama.cpp, which `tools.gguf_results` measures.
RESULTS = ROOT / "docs/gguf.json"
#: Differences and equal tokens of quantized files, which `tools.gguf_formats` measures.
FORMATS = ROOT / "docs/gguf_formats.json"
BEGIN, END = "<!-- tools/gguf_table.py -->\n", "<!-- end -->\n"


def tables(results: Mapping[str, float] | None = None) -> str:
    """Return the tables of architectures and formats.

    Args:
        results: model type -> largest difference of a logit from llama.cpp's, relative to the
            largest logit; None reads the measured ones.
    """
    measured = json.loads(RESULTS.read_text(encoding="utf-8")) if results is None else results
    blocks = {block.name: block for block in formats().values()}
    lines = heading("model type", "`general.architecture`", "difference from llama.cpp")
    for name, model_type in sorted({(r.name, r.model_type) for r in ROWS}, key=lambda n: n[1]):
        error = measured.get(model_type)
        shown = "" if error is None else f"{error:.0e}".replace("e-0", "e-")
        lines.append(row(f"`{model_type}`", f"`{name}`", shown))
    lines += ["", *heading("format", "bits for each weight", "read", "written")]
    written = {form.matrices: name for name, form in FILE_TYPES.items()}
    for name in readable_formats():
        bits = 8 * blocks[name].bytes / blocks[name].elements
        option = f"`--dtype {written[name]}`" if name in written else ""
        lines.append(row(f"`{name}`", f"{bits:.4g}", "yes", option))
    return "\n".join([*lines, *table_of_formats()]) + "\n"


def table_of_formats() -> list[str]:
    """Return the lines of the table of formats and families; empty without results."""
    if not FORMATS.is_file():
        return []
    measured = json.loads(FORMATS.read_text(encoding="utf-8"))
    families = sorted({family for found in measured.values() for family in found})
    lines = ["", *heading("format", *(f"`{family}`" for family in families))]
    for name, found in measured.items():
        cells = []
        for family in families:
            error, tokens = found.get(family, (None, 0))
            shown = "" if error is None else f"{error:.0e}".replace("e-0", "e-")
            cells.append(shown if error is None or tokens >= 64 else f"{shown}, {tokens} tokens")
        lines.append(row(f"`{name}`", *cells))
    return lines


def page(text: str) -> str:
    """Return the page with new tables."""
    return pages.with_part(text, BEGIN, END, tables())


if __name__ == "__main__":
    sys.exit(pages.main("gguf_table", PAGE, lambda: page(PAGE.read_text(encoding="utf-8"))))
