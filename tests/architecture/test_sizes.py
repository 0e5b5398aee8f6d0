"""Source files respect the size limits; the sizes are printed at the end of the run."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.workspace import ROOT, packages

SOFT_LIMIT = 400
HARD_LIMIT = 600
REASONS: dict[str, str] = {
    # "packages/ed-x/src/ed_x/y.py": "why more than 600 lines are one idea",
}
VAGUE = {"utils", "util", "helpers", "helper", "common", "misc"}


def sources() -> list[Path]:
    """Return every published Python file."""
    return [file for p in packages() for file in sorted((p.folder / "src").rglob("*.py"))]


def lines(file: Path) -> int:
    """Return the number of lines of a file."""
    return len(file.read_text(encoding="utf-8").splitlines())


def name(file: Path) -> str:
    """Return the path from the root of the workspace, with forward slashes."""
    return file.relative_to(ROOT).as_posix()


def report(sizes: dict[str, int]) -> str:
    """Return the summary of sizes: median, longest, and the files over the soft limit."""
    longest = max(sizes, key=lambda file: sizes[file])
    over = sorted((file for file in sizes if sizes[file] > SOFT_LIMIT), key=sizes.get)
    heading = (
        f"{len(sizes)} source files, {sum(sizes.values())} lines: "
        f"median {statistics.median(sizes.values()):.0f}, "
        f"longest {sizes[longest]} ({longest}), {len(over)} over {SOFT_LIMIT}"
    )
    return "\n".join([heading, *(f"  {sizes[file]} {file}" for file in reversed(over))])


def test_source_files_stay_within_size_limits(
    record_property: Callable[[str, object], None],
) -> None:
    sizes = {name(file): lines(file) for file in sources()}
    record_property("summary", report(sizes))
    unexplained = {f: n for f, n in sizes.items() if n > HARD_LIMIT and f not in REASONS}
    assert not unexplained, "split these files by idea, or add the reason to REASONS"
    assert statistics.median(sizes.values()) <= 200
    stale = [file for file in REASONS if sizes.get(file, 0) <= HARD_LIMIT]
    assert not stale, "these files are within the limit: remove their reasons"


def test_model_family_files_stay_short(record_property: Callable[[str, object], None]) -> None:
    folder = ROOT / "packages/ed-models/src/ed_models/families"
    sizes = {f.stem: lines(f) for f in folder.glob("*.py") if f.stem != "__init__"}
    longest = max(sizes, key=lambda family: sizes[family])
    median = statistics.median(sizes.values())
    record_property(
        "summary",
        f"{len(sizes)} families: median {median:.0f} lines, longest {sizes[longest]} ({longest})",
    )
    assert median <= 120 and sizes[longest] <= SOFT_LIMIT


@pytest.mark.parametrize("package", packages(), ids=lambda package: package.name)
def test_module_names_are_specific(package) -> None:
    modules = package.submodules()
    vague = [module for module in modules if module.rsplit(".", 1)[-1].strip("_") in VAGUE]
    assert not vague, "name these modules after their content"


def test_every_module_has_a_docstring() -> None:
    mute = [
        name(f) for f in sources() if not f.read_text(encoding="utf-8").lstrip().startswith('"')
    ]
    assert not mute, "these modules have no docstring"
