"""A wheel of this platform contains the compiled library, so an installation compiles nothing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from ed_layers.native.build import LIBRARY, SOURCE_FOLDERS
from native_cases import built

PACKAGE = SOURCE_FOLDERS[0].parent
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not SOURCE_FOLDERS[0].is_dir(), reason="no checkout"),
    pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed"),
]


def build_wheel(folder: Path, choice: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `uv build` with a value of `ED_LAYERS_NATIVE`."""
    command = ["uv", "build", "--wheel", "--out-dir", str(folder), str(PACKAGE)]
    environment = {**os.environ, "ED_LAYERS_NATIVE": choice, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if "Failed to fetch" in done.stderr or "No solution found" in done.stderr:
        pytest.skip("the build backend is not available without a network")
    return done


@built
def test_platform_wheel_contains_the_library_and_compiles_nothing(tmp_path: Path) -> None:
    done = build_wheel(tmp_path, "1")
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith(f"{platform.machine()}.whl")
    site = tmp_path / "site"
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(site)
    assert f"ed_layers/native/{LIBRARY.name}" in names
    assert "ed_layers/native/source/level.cc" in names
    assert not [name for name in names if "run_kernels" in name], "programs of tests"
    code = "from ed_layers.native import build, library; print(build.LIBRARY, library.level())"
    paths = os.pathsep.join([str(site), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": paths, "PATH": "", "CXX": "no-compiler"}
    output = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    path, level = output.split()
    assert Path(path).is_relative_to(site), path
    assert level != "None"


def test_pure_wheel_contains_no_library(tmp_path: Path) -> None:
    done = build_wheel(tmp_path, "0")
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in ZipFile(wheel).namelist() if name.endswith(".so")]


def test_required_library_without_a_compiler_fails_the_build(tmp_path: Path) -> None:
    done = build_wheel(tmp_path, "1", CXX="no-compiler")
    assert done.returncode != 0
    assert "no-compiler is not there; CXX names one" in done.stderr
    assert not list(tmp_path.glob("*.whl"))
