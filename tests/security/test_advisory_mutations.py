"""Each test of `docs/advisories.md` fails if the defense of its row is removed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ed_layers.native.build import LIBRARY

from tests.security.advisory_mutations import MUTATIONS, WITHOUT_MUTATION
from tools.workspace import ROOT

PAGE = ROOT / "docs" / "advisories.md"
TESTS = sorted(set(re.findall(r"`([^` ]+\.py::test_\w+)`", PAGE.read_text(encoding="utf-8"))))
#: What the copy of the repository contains.
COPIED = ("packages", "tests", "tools", "docs", "examples", "conftest.py", "pyproject.toml")
#: Seconds of a test. A defense whose removal makes its test hang fails at this limit.
LIMIT = 600


def test_every_mutation_changes_one_place_and_belongs_to_a_row() -> None:
    assert not sorted(set(MUTATIONS) - set(TESTS)), "mutations of tests that are in no row"
    for test, edits in MUTATIONS.items():
        for file, old, new in edits:
            count = (ROOT / file).read_text(encoding="utf-8").count(old)
            assert count == 1, f"{test}: {old!r} occurs {count} times in {file}"
            assert old != new


@pytest.mark.nightly
def test_every_row_has_a_mutation_or_is_listed() -> None:
    assert sorted(set(TESTS) - set(MUTATIONS)) == sorted(WITHOUT_MUTATION)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a copy of the repository, in which files may be changed."""
    folder = tmp_path_factory.mktemp("mutated") / "repository"
    ignored = shutil.ignore_patterns("__pycache__", "node_modules", "*.egg-info")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignored, symlinks=True)
        else:
            shutil.copy(source, folder / name)
    yield folder
    shutil.rmtree(folder)


def run_test(folder: Path, test: str) -> subprocess.CompletedProcess[str]:
    """Run a test with the packages of a copy of the repository."""
    file, _, name = test.partition("::")
    paths = [*sorted(map(str, folder.glob("packages/*/src"))), str(folder)]
    select = ["-k", name, "-m", "nightly or not nightly"]
    options = ["-n", "0", "-q", "-x", "-p", "no:cacheprovider", *select]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--timeout={LIMIT - 60}", file],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def build_library(folder: Path) -> None:
    """Compile the native library of a copy of the repository."""
    source = folder / "packages/ed-layers/src"
    subprocess.run(
        [sys.executable, "-m", "ed_layers.native", "build"],
        env={**os.environ, "PYTHONPATH": str(source)},
        cwd=folder,
        check=True,
        timeout=LIMIT,
    )


@pytest.mark.nightly
@pytest.mark.parametrize("test", MUTATIONS, ids=lambda test: test.partition("::")[2])
def test_test_of_a_row_fails_without_the_defense(copy: Path, test: str) -> None:
    saved: dict[Path, bytes] = {}
    try:
        for file, old, new in MUTATIONS[test]:
            path = copy / file
            text = path.read_text(encoding="utf-8")
            saved.setdefault(path, path.read_bytes())
            assert old in text
            path.write_text(text.replace(old, new), encoding="utf-8")
        if any(path.suffix in (".h", ".cc") for path in saved):
            library = copy / LIBRARY.relative_to(ROOT)
            saved[library] = library.read_bytes()
            build_library(copy)
        done = run_test(copy, test)
    finally:
        for path, content in saved.items():
            path.write_bytes(content)
    output = done.stdout + done.stderr
    if " skipped" in output and " failed" not in output:
        pytest.skip("the test of the row is skipped here")
    # 1: a test failed. 2 and more: pytest itself could not run the test. A signal: the attack ended
    # the process.
    failed = done.returncode == 1 and " failed" in output
    assert failed or done.returncode < 0, output[-3000:]
