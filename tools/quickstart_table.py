"""Write the scores and answers of examples/quickstart.yaml into README.md and docs/quickstart.md.

uv run python -m tools.quickstart_table runs/quickstart   store a run, and write the pages
uv run python -m tools.quickstart_table                   write the pages
uv run python -m tools.quickstart_table --check           exit 1 if a page is outdated
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TypedDict

from tools import pages
from tools.pages import heading, row
from tools.workspace import ROOT

PAGES = (ROOT / "README.md", ROOT / "docs" / "quickstart.md")
#: The scores and the shown answers of a run.
RESULTS = ROOT / "docs" / "quickstart.json"
BEGIN, END = "<!-- tools/quickstart_table.py -->\n", "<!-- end -->\n"
TASK = "appointments"
#: Metric of the task -> its name on the pages.
METRICS = {
    "exact_match": "answers that equal the expected object",
    "fields": "fields with the expected value",
    "valid_json": "answers that are one JSON object",
}
#: Characters of an answer on the pages.
MOST_CHARACTERS = 130


class Answer(TypedDict):
    """A message, and the answers to it."""

    message: str
    before: str
    after: str
    expected: str


class Results(TypedDict):
    """The stored part of a summary."""

    before: dict[str, float]
    after: dict[str, float]
    answers: list[Answer]


def read_run(directory: Path) -> Results:
    """Return the results in the summary of a run."""
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    return {
        "before": summary["evaluation_before_training"][TASK],
        "after": summary["evaluation"][TASK],
        "answers": [
            {
                "message": sample["prompt"][-1]["content"],
                "before": sample["before"],
                "after": sample["completion"],
                "expected": sample["expected"],
            }
            for sample in summary["samples"]
        ],
    }


def describe_score(metrics: dict[str, float], name: str) -> str:
    """Return a metric in percent with its standard error."""
    return f"{metrics[name]:.1%} ± {metrics[f'{name}_stderr']:.1%}"


def quote_answer(text: str) -> str:
    """Return an answer in one line of a table, shortened."""
    line = " ".join(text.split()).replace("`", "'").replace("|", "\\|")
    short = line if len(line) <= MOST_CHARACTERS else f"{line[: MOST_CHARACTERS - 1]}…"
    return f"`{short}`"


def build_tables(results: Results) -> str:
    """Return the table of scores and the table of answers."""
    lines = ["", *heading("held-out messages", "before training", "after training")]
    for name, text in METRICS.items():
        scores = (describe_score(of, name) for of in (results["before"], results["after"]))
        lines.append(row(text, *scores))
    lines += ["", *heading("message", "before training", "after training", "right")]
    for answer in results["answers"]:
        right = "yes" if json.loads(answer["expected"]) == parse(answer["after"]) else "no"
        texts = (quote_answer(text) for text in (answer["before"], answer["after"]))
        lines.append(row(answer["message"], *texts, right))
    return "\n".join(lines) + "\n\n"


def parse(text: str) -> object:
    """Return the value of a JSON text, or None."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def page(text: str) -> str:
    """Return a page with new tables."""
    results: Results = json.loads(RESULTS.read_text(encoding="utf-8"))
    return pages.with_part(text, BEGIN, END, build_tables(results))


def main() -> int:
    """Store the results of a run, and write or check the pages."""
    parser = argparse.ArgumentParser(prog="python -m tools.quickstart_table")
    parser.add_argument("run", type=Path, nargs="?", help="the directory of a finished run")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if outdated")
    options = parser.parse_args()
    if options.run is not None:
        text = json.dumps(read_run(options.run), indent=1, ensure_ascii=False)
        RESULTS.write_text(text + "\n", encoding="utf-8")
    outdated = [one for one in PAGES if page(one.read_text("utf-8")) != one.read_text("utf-8")]
    for one in outdated:
        if options.check:
            print(f"{one.name} is outdated: run `uv run python -m tools.quickstart_table`")
        else:
            one.write_text(page(one.read_text("utf-8")), encoding="utf-8")
    return 1 if options.check and outdated else 0


if __name__ == "__main__":
    sys.exit(main())
