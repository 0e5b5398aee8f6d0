"""Run deptry on each package: declared dependencies must equal the imported ones.

deptry runs in the folder of the package. From the root it would treat modules of a package as
transitive dependencies, and would not find imports that a wheel lacks.

Run: `uv run python -m tools.check_declared [PACKAGE ...]`.
"""

from __future__ import annotations

import subprocess
import sys

from tools.workspace import Package, packages


def deptry(package: Package) -> int:
    """Run deptry on one package and return its exit status (1: an undeclared import)."""
    print(f"-- {package.name}", flush=True)
    # pydantic's own error classes are defined in pydantic_core, which pydantic pins to one version.
    mapping = ["--package-module-name-map", "pydantic=pydantic|pydantic_core"]
    command = [sys.executable, "-m", "deptry", "src", *mapping]
    return subprocess.run(command, cwd=package.folder, check=False).returncode


if __name__ == "__main__":
    wanted = set(sys.argv[1:])
    chosen = [package for package in packages() if not wanted or package.name in wanted]
    if missing := wanted - {package.name for package in chosen}:
        sys.exit(f"no such package: {', '.join(sorted(missing))}")
    sys.exit(max(deptry(package) for package in chosen))
