"""Write the tables of docs/methods.md: the errors of every method against its reference.

uv run python -m tools.method_table --measure    measure, and write docs/methods.json and the page
uv run python -m tools.method_table --runs       measure runs, docs/method_runs.json and the page
uv run python -m tools.method_table              rewrite the page
uv run python -m tools.method_table --check      exit 1 if the page is outdated

`tests.parity.method_cases` contains the comparisons of one batch, and its module `runs` those of
whole runs. Measuring needs torch and TRL.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tools import pages
from tools.pages import heading, row
from tools.workspace import ROOT

PAGE = ROOT / "docs/methods.md"
RESULTS = ROOT / "docs/methods.json"
RUNS = ROOT / "docs/method_runs.json"
BEGIN, END = "<!-- tools/method_table.py -->\n", "<!-- end -->\n"
BEGIN_RUNS, END_RUNS = "<!-- tools/method_table.py: runs -->\n", "<!-- end of runs -->\n"
#: Largest relative error of each figure.
LIMIT = 1e-4
FIGURES = ("loss", "metrics", "gradients")
#: Largest error of each figure of a run; AdamW enlarges the rounding of small gradients.
RUN_LIMITS = {"loss": 1e-4, "parameters": 1e-2}


def measure() -> None:
    """Compare every method with its reference, and store the errors."""
    from tests.parity.method_cases import CASES

    results = {}
    for name, case in CASES.items():
        found = case.measure()
        results[name] = {figure: float(f"{found[figure]:.0e}") for figure in FIGURES}
        print(name, results[name], flush=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def measure_runs() -> None:
    """Compare the runs of methods with their references, and store the errors."""
    from tests.parity.method_cases.runs import RUNS as COMPARISONS

    results = {}
    for name, compare in COMPARISONS.items():
        found = compare()
        results[name] = {figure: float(f"{found[figure]:.0e}") for figure in RUN_LIMITS}
        print(name, results[name], flush=True)
    RUNS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def table() -> str:
    """Return the table with a line for each comparison of a batch."""
    return _build_table(RESULTS, FIGURES)


def _build_table(path: Path, figures: Sequence[str]) -> str:
    """Return a table with a line for each stored comparison."""
    from tests.parity.method_cases import CASES

    results = json.loads(path.read_text(encoding="utf-8"))
    lines = heading("method", "reference", *figures)
    for name, case in CASES.items():
        if name not in results:
            continue
        errors = (f"{results[name][f]:.0e}".replace("e-0", "e-") for f in figures)
        lines.append(row(f"`{name}`", case.reference, *(e if float(e) else "0" for e in errors)))
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return the page with new tables."""
    text = pages.with_part(PAGE.read_text(encoding="utf-8"), BEGIN, END, table())
    runs = _build_table(RUNS, tuple(RUN_LIMITS))
    return pages.with_part(text, BEGIN_RUNS, END_RUNS, runs)


if __name__ == "__main__":
    if "--runs" in sys.argv:
        sys.argv.remove("--runs")
        measure_runs()
    if "--measure" in sys.argv:
        sys.argv.remove("--measure")
        measure()
    sys.exit(pages.main("method_table", PAGE, page))
