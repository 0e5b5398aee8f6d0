"""Every code block of the documentation runs in a folder like that of a reader."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from tests.snippets.pages import Block, blocks, joined
from tools.workspace import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / ".github/CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("packages/*/README.md")),
]


#: The words of a page whose blocks need no other file, and therefore run in an empty folder.
ANY_FOLDER = "Work in any folder"


def cases() -> Iterator[pytest.ParameterSet]:
    """Yield one case per page and language; each YAML block and each skipped block is a case.

    The id of such a block has its number on the page, which most edits of a page do not change.
    """
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        found = blocks(page)
        for number, block in enumerate(found, start=1):
            alone = f"{name}:{block.language}:{number}"
            if block.skip:
                mark = pytest.mark.skip(reason=block.skip)
                yield pytest.param([block], id=alone, marks=mark)
            elif block.language == "yaml":
                yield pytest.param([block], id=alone)
        together = [b for b in found if not b.skip and b.language != "yaml"]
        together.sort(key=lambda b: (b.language, "nightly" in b.flags))
        for language, group in groupby(together, key=lambda b: b.language):
            chosen = list(group)
            usual = [b for b in chosen if "nightly" not in b.flags]
            if usual:
                yield pytest.param(usual, id=f"{name}:{language}")
            if usual != chosen:
                yield pytest.param(
                    sorted(chosen, key=lambda b: b.line),
                    id=f"{name}:{language}:all",
                    marks=pytest.mark.nightly,
                )


@pytest.fixture
def reader(tmp_path: Path, quickstart_model: Path) -> Path:
    """Return a folder with the examples and the quickstart's model (a tiny one)."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    target = tmp_path / "runs/quickstart/model"
    shutil.copytree(quickstart_model, target)
    return tmp_path


# CI runs the nightly pages, too.
@pytest.mark.daily("README.md:*", "docs/quickstart.md:bash", "docs/yaml.md:*")
@pytest.mark.parametrize("chosen", list(cases()))
def test_documentation_block_runs_without_error(chosen: list[Block], reader: Path) -> None:
    language = chosen[0].language
    if language == "yaml":
        validate(chosen[0], reader)
        return
    suffix, program = {
        "python": ("py", [sys.executable]),
        "bash": ("sh", ["bash", "-euo", "pipefail"]),
    }[language]
    # A suffix of its own, so that the script of gguf.md does not hide the module gguf.
    if ANY_FOLDER in chosen[0].page.read_text("utf-8"):
        shutil.rmtree(reader)
        reader.mkdir()
    script = reader / f"{chosen[0].page.stem}_page.{suffix}"
    script.write_text(joined(chosen), encoding="utf-8")
    scripts = Path(sys.executable).parent
    path = os.pathsep.join([str(scripts), os.environ.get("PATH", "")])
    done = subprocess.run(
        [*program, script.name],
        cwd=reader,
        # `uv run X` in a block uses this environment, with the versions under test.
        env={**os.environ, "PATH": path, "UV_NO_SYNC": "1", "UV_PROJECT": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{chosen[0].page}\n{done.stdout}\n{done.stderr}"


def validate(block: Block, folder: Path) -> None:
    """Validate a YAML block as `elarge --dry-run` does; errors have the page's line numbers."""
    from ed_elarge.config import nodes
    from ed_elarge.config.normalize import normalize

    file = folder / "run.yaml"
    file.write_text(joined([block]), encoding="utf-8")
    normalize(nodes.read_yaml(str(file)), require_actions="actions:" in block.body)


def test_pages_of_tasks_name_the_folder_in_which_their_blocks_run() -> None:
    for page in (ROOT / "docs/tasks").glob("*.md"):
        run = [block.body for block in blocks(page) if not block.skip and block.language == "bash"]
        text = page.read_text("utf-8")
        if "elarge" in "".join(run) or "esurge" in "".join(run):
            assert ANY_FOLDER in text or "work in its folder" in " ".join(text.split()), page


def test_documentation_blocks_have_their_line_numbers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# x\n\n```python\nx = 1\n```\n\n- item\n\n  ```bash nightly\n  ls\n  ```\n"
        '```yaml skip="why"\na: 1\n```\n```text\nno\n```\n',
        encoding="utf-8",
    )
    found = [(b.language, b.line, b.body, b.skip, sorted(b.flags)) for b in blocks(page)]
    assert found == [
        ("python", 4, "x = 1\n", None, []),
        ("bash", 10, "ls\n", None, ["nightly"]),
        ("yaml", 13, "a: 1\n", "why", []),
    ]
    assert joined([blocks(page)[0]]).splitlines()[3] == "x = 1"


@pytest.mark.parametrize("info", ["python nightl", 'bash skip=""', "yaml only=1"])
def test_unknown_block_marker_raises(tmp_path: Path, info: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```{info}\nx\n```\n", encoding="utf-8")
    with pytest.raises(ValueError, match="unknown"):
        blocks(page)
