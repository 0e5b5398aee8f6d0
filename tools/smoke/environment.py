"""Virtual environments outside the workspace, and the wheels that are installed into them.

All commands run in a temporary folder. Inside the workspace, uv would use the sources of sibling
packages instead of their wheels.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.workspace import ROOT, Package, packages

INSIDE = Path(__file__).parent / "inside"


class SmokeError(Exception):
    """A check of a wheel failed."""


def run(
    *command: str | Path,
    cwd: Path,
    env: dict[str, str] | None = None,
    show: bool = False,
) -> str:
    """Run a command; raise `SmokeError` with its output if it fails.

    Args:
        command: Program and arguments.
        cwd: Working directory, outside the workspace.
        env: Additional environment variables.
        show: Whether to show the output immediately instead of returning it.

    Returns:
        The standard output.
    """
    # The settings of the workspace must not affect the fresh environment.
    kept = {k: v for k, v in os.environ.items() if k not in {"VIRTUAL_ENV", "UV_LOCKED"}}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**kept, **(env or {})},
        stdout=None if show else subprocess.PIPE,
        stderr=None if show else subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        output = "\n".join(filter(None, [done.stdout, done.stderr]))
        shown = " ".join(str(part) for part in command)
        raise SmokeError(f"exit status {done.returncode} from: {shown}\n{output}")
    return done.stdout or ""


#: The package with a compiled library: a wheel for each platform, and a pure wheel.
NATIVE = "ed-layers"
PURE = "-py3-none-any.whl"


def build_wheels(dist: Path) -> None:
    """Build the wheels of every package into `dist`, each from its sdist as in a release."""
    began = time.monotonic()
    run("uv", "build", "--all-packages", "--out-dir", dist, cwd=ROOT)
    without = {"ED_LAYERS_NATIVE": "0"}
    run("uv", "build", "--package", NATIVE, "--wheel", "--out-dir", dist, cwd=ROOT, env=without)
    for package in packages():
        wheel_of(package, dist)
    print(f"built {len(packages())} packages in {time.monotonic() - began:.1f} s", flush=True)


def wheels_of(package: Package, dist: Path) -> list[Path]:
    """Return this version's wheels for this machine: the platform's, then the pure one."""
    pattern = f"{package.name.replace('-', '_')}-{package.version}-*.whl"
    system = {"darwin": "macosx", "win32": "win"}.get(sys.platform, sys.platform)
    found = list(dist.glob(pattern))
    own = [p for p in found if p.name.endswith(f"_{platform.machine()}.whl") and system in p.name]
    pure = [p for p in found if p.name.endswith(PURE)]
    if len(own) > 1 or len(pure) > 1 or not own + pure:
        names = ", ".join(p.name for p in found) or "none"
        raise SmokeError(f"{dist} contains {names} of {pattern}: build into an empty folder")
    return own + pure


def wheel_of(package: Package, dist: Path) -> Path:
    """Return the wheel in `dist` that an installer would select for this version of a package."""
    return wheels_of(package, dist)[0]


@dataclass(frozen=True)
class Environment:
    """A virtual environment in a temporary folder."""

    folder: Path

    @classmethod
    def create(cls, folder: Path, python: str) -> Environment:
        """Create an empty environment for a Python version such as `"3.11"`."""
        folder.mkdir(parents=True)
        run("uv", "venv", "--quiet", "--no-project", "--python", python, "venv", cwd=folder)
        return cls(folder)

    @property
    def python(self) -> Path:
        """Path of the interpreter."""
        scripts = "Scripts" if sys.platform == "win32" else "bin"
        return self.folder / "venv" / scripts / "python"

    def install(
        self,
        chosen: Sequence[Package],
        dist: Path,
        *,
        resolution: str = "highest",
        extras: bool = False,
        requirements: Sequence[str] = (),
    ) -> None:
        """Install packages from their wheels; sibling packages also come from `dist`.

        Args:
            chosen: Packages to install.
            dist: Folder of the wheels.
            resolution: `"highest"`, or `"lowest-direct"` for the lower bounds of the packages.
            extras: Whether to install every extra of the packages.
            requirements: Further requirements, in the same resolution.
        """
        wheels = [f"{p.name}{_extras(p) if extras else ''} @ {_uri(p, dist)}" for p in chosen]
        install = ("uv", "pip", "install", "--quiet", "--python", self.python)
        links = ("--find-links", dist)
        constraints: tuple[str, ...] = ()
        if resolution == "lowest-direct":
            floors = self.folder / "floors.txt"
            floors.write_text(self._floors(chosen, dist, extras), encoding="utf-8")
            constraints = ("--constraints", str(floors))
        run(*install, *links, *constraints, *wheels, *requirements, cwd=self.folder)

    def _floors(self, chosen: Sequence[Package], dist: Path, extras: bool) -> str:
        # `uv pip install --resolution lowest-direct WHEEL` treats only the wheel itself as direct.
        # Compiling the pyproject files treats their requirements as direct.
        copies = []
        for package in chosen:
            copy = self.folder / "projects" / package.name / "pyproject.toml"
            copy.parent.mkdir(parents=True)
            copy.write_bytes((package.folder / "pyproject.toml").read_bytes())
            copies.append(copy)
        compiled = run(
            *("uv", "pip", "compile", "--quiet", "--no-sources", "--no-header"),
            *("--resolution", "lowest-direct", "--python", self.python, "--find-links", dist),
            *(["--all-extras"] if extras else []),
            *copies,
            cwd=self.folder,
        )
        return "\n".join(
            line
            for line in compiled.splitlines()
            if line and not line.lstrip().startswith(("#", "--"))
        )

    def inside(self, script: str, *arguments: str | Path, env: dict[str, str] | None = None) -> str:
        """Run a script of `tools/smoke/inside` in the environment, and return its output."""
        # -P: modules in the script's folder must not be importable in the environment under test.
        command = (self.python, "-P", INSIDE / script, *arguments)
        return run(*command, cwd=self.folder, env=env)

    def installed(self) -> dict[str, str]:
        """Return distribution name -> version of all installed distributions."""
        listing = ("uv", "pip", "list", "--quiet", "--format", "json", "--python", self.python)
        rows = json.loads(run(*listing, cwd=self.folder))
        return {row["name"]: row["version"] for row in rows}

    def site_packages(self) -> Path:
        """Return the folder of the installed packages."""
        program = "import sysconfig; print(sysconfig.get_path('purelib'))"
        return Path(run(self.python, "-c", program, cwd=self.folder).strip())

    def size(self) -> int:
        """Return the bytes of the installed files, without compiled byte code."""
        files = self.site_packages().rglob("*")
        return sum(f.stat().st_size for f in files if f.is_file() and f.suffix != ".pyc")


def _uri(package: Package, dist: Path) -> str:
    return wheel_of(package, dist).as_uri()


def _extras(package: Package) -> str:
    extras = package.project.get("optional-dependencies", {})
    return f"[{','.join(sorted(extras))}]" if extras else ""
