"""Files stay readable: the sizes are printed at the end of the run, and the limits hold."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.workspace import ROOT, packages

WANTS_SPLITTING = 400
NEEDS_A_REASON = 600
REASONS: dict[str, str] = {
    # "packages/ed-x/src/ed_x/y.py": "why this file is one idea of more than 600 lines",
}
VAGUE = {"utils", "util", "helpers", "helper", "common", "misc"}


def sources() -> list[Path]:
    """Every Python file that is shipped."""
    return [file for p in packages() for file in sorted((p.folder / "src").rglob("*.py"))]


def lines(file: Path) -> int:
    """Number of lines of a file."""
    return len(file.read_text(encoding="utf-8").splitlines())


def name(file: Path) -> str:
    """Path from the root of the workspace, with forward slashes."""
    return file.relative_to(ROOT).as_posix()


def report(sizes: dict[str, int]) -> str:
    """What issue and docs quote: median, longest, and the files over the soft limit."""
    longest = max(sizes, key=lambda file: sizes[file])
    over = sorted((file for file in sizes if sizes[file] > WANTS_SPLITTING), key=sizes.get)
    heading = (
        f"{len(sizes)} source files, {sum(sizes.values())} lines: "
        f"median {statistics.median(sizes.values()):.0f}, "
        f"longest {sizes[longest]} ({longest}), {len(over)} over {WANTS_SPLITTING}"
    )
    return "\n".join([heading, *(f"  {sizes[file]} {file}" for file in reversed(over))])


def test_source_files_stay_within_size_limits(
    record_property: Callable[[str, object], None],
) -> None:
    sizes = {name(file): lines(file) for file in sources()}
    record_property("summary", report(sizes))
    unexplained = {f: n for f, n in sizes.items() if n > NEEDS_A_REASON and f not in REASONS}
    assert not unexplained, "split by idea, or write the reason into REASONS"
    assert statistics.median(sizes.values()) <= 200
    stale = [file for file in REASONS if sizes.get(file, 0) <= NEEDS_A_REASON]
    assert not stale, "these files no longer need their reason"


def test_model_family_files_stay_short(record_property: Callable[[str, object], None]) -> None:
    folder = ROOT / "packages/ed-models/src/ed_models/families"
    sizes = {f.stem: lines(f) for f in folder.glob("*.py") if f.stem != "__init__"}
    longest = max(sizes, key=lambda family: sizes[family])
    median = statistics.median(sizes.values())
    record_property(
        "summary",
        f"{len(sizes)} families: median {median:.0f} lines, longest {sizes[longest]} ({longest})",
    )
    assert median <= 120 and sizes[longest] <= WANTS_SPLITTING


@pytest.mark.parametrize("package", packages(), ids=lambda package: package.name)
def test_modules_are_named_after_an_idea(package) -> None:
    # The umbrella's module paths are EasyDeL's: `easydel.infra.utils` must exist.
    own = [module for module in package.submodules() if not module.startswith("easydel")]
    vague = [module for module in own if module.rsplit(".", 1)[-1].strip("_") in VAGUE]
    assert not vague, "name the module after what it holds"


def test_every_module_has_a_docstring() -> None:
    mute = [
        name(f) for f in sources() if not f.read_text(encoding="utf-8").lstrip().startswith('"')
    ]
    assert not mute, "a module starts with a docstring"
