"""Write the table of docs/models.md: every family with its errors in the conformance suite.

uv run python -m tools.model_table            rewrite the table
uv run python -m tools.model_table --check    exit 1 if the table is outdated

The errors come from docs/conformance.json, which `tests.conformance.results` writes.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tests.conformance.results import Results, read
from tools import pages
from tools.pages import heading, row
from tools.workspace import ROOT

if TYPE_CHECKING:
    from ed_infra.enums import TaskType

PAGE = ROOT / "docs/models.md"
BEGIN, END = "<!-- tools/model_table.py -->\n", "<!-- end -->\n"


def special(model_type: str) -> str:
    """Return the first sentence of a family's module docstring."""
    from ed_infra import registry

    module = registry.get_config(model_type).__module__
    text = inspect.getsource(sys.modules[module])
    return text.split('"""')[1].strip().split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def largest(results: Results, model_type: str, check: str, task: str = "") -> str:
    """Return the largest error over a family's rows; `0` means equal tokens or equal bits.

    Args:
        results: the stored results.
        model_type: the family.
        check: name of the check.
        task: task of the rows; empty = all rows.
    """
    rows = results.get(model_type, {}).items()
    values = [
        of[check] for name, of in rows if check in of and name.endswith(f"({task})" * bool(task))
    ]
    if not values:
        return ""
    if any(isinstance(value, str) for value in values):
        return "fails"
    worst = max(value for value in values if isinstance(value, float))
    return f"{worst:.0e}".replace("e-0", "e-") if worst else "0"


def table(results: Results | None = None) -> str:
    """Return a table of causal language models, and one of the other families by task."""
    from ed_infra import registry
    from ed_infra.enums import TaskType
    from ed_models.checkpoints.text_halves import MODEL_TYPES

    from tests.conformance.results import checks

    results = read() if results is None else results
    names = list(checks())
    tasks = {name: set(registry.list_tasks(name)) for name in registry.model_types()}
    causal = [name for name, of in tasks.items() if TaskType.CAUSAL_LM in of]
    lines = heading("`model_type`", "characteristics", *names)
    for model_type in causal:
        errors = (largest(results, model_type, name) for name in names)
        lines.append(row(f"`{model_type}`", special(model_type), *errors))
    shared = _listed(set.intersection(*(tasks[name] for name in causal)))
    others = heading("`model_type`", "task", "characteristics", *names[:-1])
    for model_type in (name for name in tasks if name not in causal):
        stored = " ".join(results.get(model_type, {}))
        checked = [task for task in registry.list_tasks(model_type) if f"({task})" in stored]
        for number, task in enumerate(checked or [""]):
            text = "" if number else special(model_type)
            cells = (largest(results, model_type, name, task) for name in names[:-1])
            shown = task or registry.list_tasks(model_type)[0]
            others.append(row(f"`{model_type}`", f"`{shown}`", text, *cells))
    summary = f"{len(causal)} families of causal language models, each with the tasks {shared}."
    halves = ", ".join(f"`{name}`" for name in sorted(MODEL_TYPES))
    half = f"Multimodal models whose text half is loaded: {halves}."
    rest = (
        f"{len(tasks) - len(causal)} families of other tasks. Every encoder also has the task "
        "`embedding`, with the numbers of its `base-module`."
    )
    return "\n".join([summary, half, "", *lines, "", rest, "", *others]) + "\n"


def _listed(tasks: Iterable[TaskType]) -> str:
    return ", ".join(f"`{task}`" for task in sorted(tasks))


def page(text: str) -> str:
    """Return the page with a new table."""
    return pages.with_part(text, BEGIN, END, table())


if __name__ == "__main__":
    sys.exit(pages.main("model_table", PAGE, lambda: page(PAGE.read_text(encoding="utf-8"))))
