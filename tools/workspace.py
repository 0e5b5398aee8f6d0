"""The seven packages of the workspace, from their pyproject files."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent


def read_toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Package:
    """One published package: the folder `packages/<name>`."""

    folder: Path

    @cached_property
    def pyproject(self) -> dict[str, Any]:
        """The whole pyproject file."""
        return read_toml(self.folder / "pyproject.toml")

    @property
    def project(self) -> dict[str, Any]:
        """The `[project]` table."""
        return self.pyproject["project"]

    @property
    def name(self) -> str:
        """The distribution name, for example `ed-infra`."""
        return self.project["name"]

    @property
    def version(self) -> str:
        """The version written in the pyproject file."""
        return self.project["version"]

    @property
    def modules(self) -> list[str]:
        """The import names that the wheel installs, for example `["ed_elarge", "easydel"]`."""
        wheel = self.pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]
        return [Path(source).name for source in wheel["packages"]]

    @property
    def requirements(self) -> list[Requirement]:
        """Dependencies without extras."""
        return [Requirement(text) for text in self.project.get("dependencies", [])]

    @property
    def all_requirements(self) -> list[Requirement]:
        """Dependencies with all extras."""
        extras = self.project.get("optional-dependencies", {}).values()
        return self.requirements + [Requirement(text) for group in extras for text in group]

    def submodules(self, root: Path | None = None) -> list[str]:
        """Return the dotted names of all modules under `src`, packages included.

        Args:
            root: Folder of the import packages; by default this package's `src`.
        """
        root = root or self.folder / "src"
        files = (file for module in self.modules for file in (root / module).rglob("*.py"))
        parts = (file.relative_to(root).with_suffix("").parts for file in files)
        return sorted(".".join(p[:-1] if p[-1] == "__init__" else p) for p in parts)


def packages(root: Path = ROOT) -> list[Package]:
    """All packages of the workspace, in alphabetical order."""
    return [Package(file.parent) for file in sorted(root.glob("packages/*/pyproject.toml"))]
