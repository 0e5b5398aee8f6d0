"""Write the table of equal bits in docs/native.md from docs/bits.json.

uv run python -m tools.bits_table            rewrite the table
uv run python -m tools.bits_table --check    exit 1 if the table is outdated
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

from ed_infra.enums import TaskType

from tests.conformance.cases import subjects
from tools import pages
from tools.pages import heading, row
from tools.workspace import ROOT

PAGE = ROOT / "docs/native.md"
#: Family -> dtype -> condition -> "equal", a difference or `REFUSED`. `tests.conformance.bits`
#: measures them. A family that is refused has one condition, `REFUSED`, and the reason.
RESULTS = ROOT / "docs/bits.json"
BEGIN, END = "<!-- tools/bits_table.py -->\n", "<!-- end -->\n"
MESHES = ("dp", "fsdp", "tp")
#: Column -> conditions.
COLUMNS: dict[str, tuple[str, ...]] = {
    "batch, warm prefix": ("batch, warm prefix",),
    "chunks": ("chunks",),
    "preempted": ("preempted",),
    "drafts": ("speculative",),
    "forward pass": ("forward 1", "forward 4"),
    "`generate`": ("generate 1", "generate 4"),
    **{
        f"`{mesh}`": tuple(f"{way} {mesh}" for way in ("engine", "forward", "generate"))
        for mesh in MESHES
    },
}
REFUSED = "refused"
Results = dict[str, dict[str, dict[str, str]]]


def read() -> Results:
    """Return the stored results."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}


def store(family: str, dtype: str, cells: Mapping[str, str]) -> None:
    """Store the results of a family."""
    results = read()
    results.setdefault(family, {})[dtype] = dict(cells)
    text = json.dumps(dict(sorted(results.items())), indent=1)
    RESULTS.write_text(text + "\n", encoding="utf-8")


def equal_rows() -> list[tuple[str, str]]:
    """Return the families and dtypes whose bits are equal under every condition that no error
    refuses."""
    return [
        (family, dtype)
        for family, rows in read().items()
        for dtype, cells in rows.items()
        if "equal" in cells.values() and set(cells.values()) <= {"equal", REFUSED}
    ]


def shown(cells: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Return the cell of a column: `=`, the values that are not equal, or nothing."""
    if not all(name in cells for name in names):
        return ""
    return ", ".join(sorted({cells[n] for n in names} - {"equal"})) or "="


def table() -> str:
    """Return the table, the refused families and those that were not run."""
    results, known = read(), {s.model_type for s in subjects() if s.task == TaskType.CAUSAL_LM}
    lines = ["", *heading("family", "dtype", *COLUMNS)]
    refused: list[str] = []
    missing: dict[str, list[str]] = {"float32": [], "bfloat16": []}
    for family in sorted(known):
        rows = results.get(family, {})
        reasons = {cells[REFUSED] for cells in rows.values() if REFUSED in cells}
        refused += [f"`{family}` ({reason})" for reason in sorted(reasons)[:1]]
        for dtype in () if reasons else missing:
            if dtype in rows:
                cells = (shown(rows[dtype], names) for names in COLUMNS.values())
                lines.append(row(f"`{family}`", dtype, *cells))
            else:
                missing[dtype].append(f"`{family}`")
    wholly = [family for family in missing["float32"] if family in missing["bfloat16"]]
    partly = [
        f"{family} in {dtype}"
        for dtype, families in missing.items()
        for family in families
        if family not in wholly
    ]
    lines += ["", f"An error refuses: {', '.join(refused)}."] if refused else []
    lines += ["", f"Not run: {', '.join(partly + wholly)}."] if partly or wholly else []
    return "\n".join(lines) + "\n\n"


def page(text: str) -> str:
    """Return the page with a new table."""
    return pages.with_part(text, BEGIN, END, table())


if __name__ == "__main__":
    sys.exit(pages.main("bits_table", PAGE, lambda: page(PAGE.read_text(encoding="utf-8"))))
