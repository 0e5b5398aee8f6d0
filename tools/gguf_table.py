"""Write the tables of docs/gguf.md: architectures and formats of GGUF files.

uv run python -m tools.gguf_table            rewrite them
uv run python -m tools.gguf_table --check    exit 1 if the tables are outdated
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ed_models.checkpoints.gguf.blocks import readable_formats
from ed_models.checkpoints.gguf.header import formats
from ed_models.checkpoints.gguf.table import ARCHITECTURES
from ed_models.checkpoints.gguf.writer import GGUF_FILE_TYPES

from tools import pages
from tools.pages import heading, row
from tools.workspace import ROOT

PAGE = ROOT / "docs/gguf.md"
#: Differences from llama.cpp, which
#: `tests.parity.gguf_comparisons logits` measures.
RESULTS = ROOT / "docs/gguf.json"
#: Differences and equal tokens of quantized files, which
#: `tests.parity.gguf_comparisons formats` measures.
FORMATS = ROOT / "docs/gguf_formats.json"
#: Perplexities, which `tests.parity.gguf_comparisons perplexities` measures.
PERPLEXITY = ROOT / "docs/gguf_perplexity.json"
#: Formats whose files are compared for every architecture.
COMMON = ("F32", "Q4_K")
#: Ending of the name of a format whose results have a rounded GELU.
ROUNDED = ", rounded GELU"
#: Greedy tokens of a comparison.
NEW_TOKENS = 64
BEGIN, END = "<!-- tools/gguf_table.py -->\n", "<!-- end -->\n"


def tables(results: Mapping[str, float] | None = None) -> str:
    """Return the tables of architectures and formats.

    Args:
        results: model type -> largest difference of a logit from llama.cpp's, relative to the
            largest logit; None reads the measured ones.
    """
    found = _read(FORMATS)
    measured = _read(RESULTS) if results is None else results
    blocks = {block.name: block for block in formats().values()}
    lines = heading("model type", "`general.architecture`", *(f"`{name}`" for name in COMMON))
    own: dict[str, str] = {}
    for architecture in ARCHITECTURES:  # the first one is that of files which this project writes
        own.setdefault(architecture.model_type, architecture.name)
    for name, model_type in sorted(
        {(r.name, r.model_type) for r in ARCHITECTURES}, key=lambda n: n[::-1]
    ):
        cells = [list(found.get(form, {}).get(model_type, (0.0, NEW_TOKENS))) for form in COMMON]
        cells[0][0] = max(cells[0][0], measured.get(model_type, 0.0))
        if own[model_type] != name:
            cells = [[0.0, NEW_TOKENS]] * len(COMMON)
        lines.append(row(f"`{model_type}`", f"`{name}`", *(_cell(*cell) for cell in cells)))
    lines += ["", *heading("format", "bits for each weight", "read", "written")]
    written = {form.matrices: name for name, form in GGUF_FILE_TYPES.items()}
    for name in readable_formats():
        bits = 8 * blocks[name].bytes / blocks[name].elements
        option = f"`--dtype {written[name]}`" if name in written else ""
        lines.append(row(f"`{name}`", f"{bits:.4g}", "yes", option))
    return (
        "\n".join([*lines, *table_of_formats(), *table_of_rounded_gelu(), *table_of_perplexities()])
        + "\n"
    )


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _cell(error: float, tokens: int) -> str:
    """Return a difference, and the number of equal tokens if it is not that of a comparison."""
    shown = f"{error:.0e}".replace("e-0", "e-") if error else ""
    return shown if tokens >= NEW_TOKENS else f"{shown}, {tokens} tokens"


def table_of_formats() -> list[str]:
    """Return the lines of the table of formats, for families with all formats."""
    read = _read(FORMATS)
    measured = {name: found for name, found in read.items() if not name.endswith(ROUNDED)}
    counts = Counter(family for found in measured.values() for family in found)
    families = sorted(family for family, count in counts.items() if count > len(COMMON))
    lines = ["", *heading("format", *(f"`{family}`" for family in families))]
    for name, found in measured.items():
        cells = (_cell(*found.get(family, (0.0, NEW_TOKENS))) for family in families)
        lines.append(row(f"`{name}`", *cells))
    return lines


def table_of_rounded_gelu() -> list[str]:
    """Return the lines of the table of families with GELU, also rounded; empty without results."""
    read = _read(FORMATS)
    names = [name for form in COMMON for name in (form, f"{form}{ROUNDED}")]
    lines = ["", *heading("model type", *names)]
    if names[1] not in read:
        return []
    for family in read[names[1]]:
        cells = (_cell(*read.get(name, {}).get(family, (0.0, NEW_TOKENS))) for name in names)
        lines.append(row(f"`{family}`", *cells))
    return lines


def table_of_perplexities() -> list[str]:
    """Return the lines of the table of perplexities."""
    columns = ("this project", "llama.cpp, decoded file", "llama.cpp")
    lines = ["", *heading("format", *columns)]
    for name, found in _read(PERPLEXITY).items():
        lines.append(row(f"`{name}`", *(f"{value:.4f}" for value in found)))
    return lines


def page(text: str) -> str:
    """Return the page with new tables."""
    return pages.with_part(text, BEGIN, END, tables())


if __name__ == "__main__":
    sys.exit(pages.main("gguf_table", PAGE, lambda: page(PAGE.read_text(encoding="utf-8"))))
