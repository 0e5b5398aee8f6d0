"""The recipes of CONTRIBUTING and docs/adding_parts.md work in a copy of the packages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tools.workspace import ROOT

PAGE = ROOT / ".github/CONTRIBUTING.md"
FURTHER = ROOT / "docs/adding_parts.md"
SKIP = "tests/recipes applies this recipe"
#: The sentence before a block, and the block.
STEP = re.compile(
    r"^(?P<sentence>(?:Create|In|Check)\b(?:(?!```).)*?):\n\n"
    rf'```(?:python skip="{SKIP}"|text)\n(?P<body>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)


def recipes() -> dict[str, str]:
    """Return the text of each recipe by its heading."""
    part = PAGE.read_text("utf-8").split("## Adding other parts\n", 1)[1].split("\n## ", 1)[0]
    _, *sections = re.split(r"^### ", part, flags=re.MULTILINE)
    _, *further = re.split(r"^## ", FURTHER.read_text("utf-8"), flags=re.MULTILINE)
    return dict(section.split("\n", 1) for section in (*sections, *further))


def copy_of_packages(folder: Path, text: str) -> list[Path]:
    """Copy the sources that a recipe changes, link the others, and return the import path."""
    changed = set(re.findall(r"`packages/(ed-\w+)/", text))
    sources = []
    for package in sorted((ROOT / "packages").iterdir()):
        target = folder / "packages" / package.name
        if package.name in changed:
            ignored = shutil.ignore_patterns("__pycache__")
            for part in filter(Path.is_dir, (package / "src", package / "native")):
                shutil.copytree(part, target / part.name, ignore=ignored)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(package)
        sources.append(target / "src")
    return sources


def apply(folder: Path, sentence: str, body: str) -> None:
    """Create a file, or insert lines next to a line that occurs exactly once, as indented."""
    path, *anchor = re.findall(r"`([^`]+)`", sentence)
    file = folder / path
    if sentence.startswith("Create"):
        assert not file.exists(), f"{path} exists"
        file.write_text(body, "utf-8")
        return
    lines = file.read_text("utf-8").splitlines(keepends=True)
    places = [number for number, line in enumerate(lines) if line.strip() == anchor[0]]
    assert len(places) == 1, f"{path} contains {len(places)} lines {anchor[0]!r}"
    found = lines[places[0]]
    indented = textwrap.indent(body, found[: len(found) - len(found.lstrip())])
    if found.rstrip().endswith("{"):  # the first entry of a mapping
        indented = textwrap.indent(body, "    ")
    place = places[0] + ("after" in sentence)
    file.write_text("".join([*lines[:place], indented, *lines[place:]]), "utf-8")


@pytest.mark.nightly  # CI runs this test
@pytest.mark.parametrize("name", recipes())
def test_recipe_works_in_a_copy_of_the_packages(name: str, tmp_path: Path) -> None:
    text = recipes()[name]
    sources = copy_of_packages(tmp_path, text)
    steps = list(STEP.finditer(text))
    assert len(steps) == text.count("```") // 2, "a block lacks its sentence"
    checks = 0
    for step in steps:
        if step["sentence"] != "Check":
            apply(tmp_path, step["sentence"], step["body"])
            continue
        checks += 1
        work = tmp_path / "work"
        work.mkdir()
        given = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        path = os.pathsep.join([*map(str, sources), *given])
        done = subprocess.run(
            [sys.executable, "-c", step["body"]],
            cwd=work,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert checks == 1


def test_every_kind_of_part_has_a_recipe() -> None:
    assert [name.lower() for name in recipes()] == [
        "a method",
        "a data source",
        "a kernel",
        "a quantization format",
        "an endpoint",
        "a tool format",
        "an option of the server",
        "a vision layout",
        "a kind of rows",
        "a format of rows",
        "a c++ kernel",
    ]


def test_commands_of_the_table_name_existing_paths() -> None:
    table = PAGE.read_text("utf-8").split("## Commands\n", 1)[1].split("\n\n`uv run", 1)[0]
    paths = re.findall(r"\b((?:tests|packages)/[\w/.-]+)", table)
    modules = re.findall(r"-m (tools[\w.]*)", table)
    assert paths and modules
    assert all((ROOT / path).exists() for path in paths)
    for module in modules:
        file = ROOT.joinpath(*module.split("."))
        assert file.is_dir() or file.with_suffix(".py").is_file(), module
