"""Write the table of docs/methods.md: the errors of every method against its reference.

uv run python -m tools.method_table --measure    measure, and write docs/methods.json and the page
uv run python -m tools.method_table              rewrite the page
uv run python -m tools.method_table --check      exit 1 if the page is outdated

`tests.parity.method_cases` contains the comparisons. Measuring needs torch and TRL.
"""

from __future__ import annotations

import json
import sys

from tools import pages
from tools.pages import heading, row
from tools.workspace import ROOT

PAGE = ROOT / "docs/methods.md"
RESULTS = ROOT / "docs/methods.json"
BEGIN, END = "<!-- tools/method_table.py -->\n", "<!-- end -->\n"
#: Largest relative error of each figure.
LIMIT = 1e-4
FIGURES = ("loss", "metrics", "gradients")


def measure() -> None:
    """Compare every method with its reference, and store the errors."""
    from tests.parity.method_cases import CASES

    results = {}
    for name, case in CASES.items():
        found = case.measure()
        results[name] = {figure: float(f"{found[figure]:.0e}") for figure in FIGURES}
        print(name, results[name], flush=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def table() -> str:
    """Return the table with a line for each comparison."""
    from tests.parity.method_cases import CASES

    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    lines = heading("method", "reference", *FIGURES)
    for name, case in CASES.items():
        errors = (f"{results[name][f]:.0e}".replace("e-0", "e-") for f in FIGURES)
        lines.append(row(f"`{name}`", case.reference, *(e if float(e) else "0" for e in errors)))
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return the page with a new table."""
    return pages.with_part(PAGE.read_text(encoding="utf-8"), BEGIN, END, table())


if __name__ == "__main__":
    if "--measure" in sys.argv:
        sys.argv.remove("--measure")
        measure()
    sys.exit(pages.main("method_table", PAGE, page))
