"""The import contracts between packages hold, and each contract detects a violation."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

from tools.workspace import ROOT, packages, read_toml

CONTRACTS = {
    contract["id"]: contract["name"]
    for contract in read_toml(ROOT / "pyproject.toml")["tool"]["importlinter"]["contracts"]
}

# One forbidden import for each contract: (a new module, its text).
VIOLATIONS = [
    ("layers", "ed_models/stray.py", "import ed_trainers"),
    ("layers", "ed_trainers/stray.py", "import ed_data"),
    ("layers", "ed_esurge/stray.py", "def late():\n    import ed_trainers"),
    ("data", "ed_data/stray.py", "import ed_infra.errors"),
    ("data", "ed_data/stray.py", "import jax.numpy"),
    ("torch", "ed_layers/stray.py", "def late():\n    from torch import nn"),
    ("inference", "ed_models/stray.py", "import optax"),
    ("inference", "ed_esurge/stray.py", "import orbax.checkpoint"),
    ("core", "ed_esurge/core/stray.py", "import ed_layers.projections.linear"),
    ("core", "ed_esurge/core/stray.py", "import jax"),
    ("engine", "ed_esurge/engine/stray.py", "def late():\n    import starlette.requests"),
    ("engine", "ed_esurge/replies/stray.py", "import ed_esurge.server.http.errors"),
    ("frontends", "ed_esurge/server/stray.py", "import ed_esurge.frontends.ollama.chat"),
    ("options", "ed_infra/config/fields.py", "def late():\n    import ed_infra.sharding.mesh"),
    ("families", "ed_models/families/stray.py", "import ed_models.families.llama"),
    ("acyclic", "ed_infra/errors.py", "def late():\n    import ed_infra.sharding.mesh"),
]


def lint_imports(source: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the installed packages, or on a copy of them."""
    environment = {**os.environ, "COLUMNS": "200"}
    if source is not None:
        environment["PYTHONPATH"] = str(source)
    code = "import sys; from importlinter.cli import lint_imports_command as main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-P", "-c", code, "--no-cache", "--no-logo"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the import packages of the workspace into one folder."""
    folder = tmp_path_factory.mktemp("arrows")
    for package in packages():
        for module in package.modules:
            source = package.folder / "src" / module
            shutil.copytree(source, folder / module, ignore=shutil.ignore_patterns("*.pyc"))
    return folder


def test_import_contracts_cover_every_module() -> None:
    """The contracts would ignore a folder without `__init__.py`."""
    seen = grimp.build_graph(*(m for p in packages() for m in p.modules), cache_dir=None).modules
    assert set().union(*(package.submodules() for package in packages())) <= seen


def test_import_contracts_hold_between_packages() -> None:
    result = lint_imports()
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"Contracts: {len(CONTRACTS)} kept, 0 broken." in result.stdout


@pytest.mark.daily("torch-*")
@pytest.mark.parametrize(("contract", "file", "text"), VIOLATIONS)
def test_forbidden_import_breaks_its_contract(
    copy: Path, contract: str, file: str, text: str
) -> None:
    target = copy / file
    before = target.read_text(encoding="utf-8") if target.exists() else None
    target.write_text(f"{before or ''}\n{text}\n", encoding="utf-8")
    try:
        result = lint_imports(copy)
    finally:
        if before is None:
            target.unlink()
        else:
            target.write_text(before, encoding="utf-8")
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"{CONTRACTS[contract]} BROKEN" in result.stdout, result.stdout


def test_every_contract_has_a_violation_case() -> None:
    assert {contract for contract, _, _ in VIOLATIONS} == set(CONTRACTS)
