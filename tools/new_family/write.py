"""Write the files of a drafted family, run its conformance suite, and report what remains."""

from __future__ import annotations

import os
import pprint
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.new_family.build import Result
from tools.new_family.draft import Draft, format_source
from tools.new_model import (
    CASES,
    CONFTEST,
    FAMILIES,
    MODELS,
    PYPROJECT,
    SECTION,
    TEST,
    with_entry_point,
)
from tools.workspace import ROOT


def report(model_type: str, result: Result) -> list[str]:
    """Return the lines of the report: parents, switches, and what stays unexplained."""
    lines = [f"{model_type}: {' -> '.join(result.chain)} ({result.seconds:.1f} s)"]
    lines += [f"  {line}" for line in result.lineage.describe()]
    lines += [f"  tried: {line}" for line in result.tried]
    if result.draft is None:
        lines.append(f"  no family is written: {result.unexplained}")
    else:
        lines += [f"  {row}: logits {error:.1e}" for row, error in result.errors.items()]
        lines.append(f"  {len(result.draft.source.splitlines())} lines")
    return lines


def format_cases(rows: dict[str, dict[str, Any]]) -> str:
    """Return the table `CASES` of a file with tiny configurations."""
    return format_source(f"CASES = Cases(\n{pprint.pformat(rows, sort_dicts=False, width=96)}\n)\n")


def write_family(draft: Draft, rows: dict[str, dict[str, Any]], package: Path | None) -> list[Path]:
    """Write the family, its tiny configurations and its entry point; return the files."""
    module = draft.model_type.replace("-", "_")
    cases = format_cases(rows)
    if package is not None:
        return _write_package(draft, module, cases, package.resolve())
    target, pyproject = FAMILIES / f"{module}.py", MODELS / "pyproject.toml"
    target.write_text(draft.source, encoding="utf-8")
    case_file = CASES / f"{draft.model_type}.py"
    head = f'"""Tiny configurations of {draft.model_type}."""\n\n'
    case_file.write_text(
        f"{head}from ed_models.conformance import Cases\n\n{cases}", encoding="utf-8"
    )
    text = pyproject.read_text(encoding="utf-8")
    line = with_entry_point(text, draft.model_type, f"ed_models.families.{module}")
    pyproject.write_text(line, encoding="utf-8")
    return [target, case_file, pyproject]


def _write_package(draft: Draft, module: str, cases: str, folder: Path) -> list[Path]:
    name = folder.name.replace("-", "_")
    pyproject, target = folder / "pyproject.toml", folder / "src" / name / f"{module}.py"
    files = {
        pyproject: PYPROJECT.format(name=folder.name, module=name, section=SECTION),
        folder / "README.md": f"# {folder.name}\n\nModel families for EasyDeL.\n",
        target.with_name("__init__.py"): '"""Model families, found by their entry points."""\n',
        folder / "tests/conftest.py": CONFTEST,
        folder / f"tests/test_{module}.py": TEST.format(
            model_type=draft.model_type, cases=f"\n{cases}"
        ),
        target: draft.source,
    }
    written = [path for path in files if not path.exists()]
    for path in written:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files[path], encoding="utf-8")
    text = with_entry_point(
        pyproject.read_text(encoding="utf-8"), draft.model_type, f"{name}.{module}"
    )
    pyproject.write_text(text, encoding="utf-8")
    return written


def run_suite(draft: Draft) -> int:
    """Run the conformance suite of a family in a child process; 0 = all checks pass."""
    with tempfile.TemporaryDirectory() as folder:
        path = install_entry_point(Path(folder), draft.model_type)
        environment = {**os.environ}
        environment["PYTHONPATH"] = os.pathsep.join([str(path), environment.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "tests.conformance.results", draft.model_type]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def install_entry_point(folder: Path, *model_types: str) -> Path:
    """Write metadata of a package with entry points, as an installation does; return the folder."""
    metadata = folder / "drafted_families-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    lines = [f"{name} = ed_models.families.{name.replace('-', '_')}" for name in model_types]
    (metadata / "entry_points.txt").write_text("[easydel.models]\n" + "\n".join(lines) + "\n")
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: drafted-families\nVersion: 0\n"
    )
    return folder


def list_steps(model_type: str, package: Path | None) -> str:
    """Return the next commands."""
    if package is not None:
        return f"next:\n  uv pip install -e {package}\n  uv run --no-sync pytest {package}/tests"
    return (
        "next: read the description and the tiny configurations; then\n"
        "  uv sync --reinstall-package ed-models    (its entry point is found once installed)\n"
        "  uv run python -m tools.model_table"
    )
