"""The command line: exit codes, imports and messages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PRETRAIN = Path(__file__).parents[3] / "examples" / "pretrain.yaml"


def elarge(*arguments: str, module: str = "ed_elarge") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    environment = {**os.environ, "TERM": "dumb", "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_dry_run_imports_neither_jax_nor_transformers() -> None:
    code = (
        "import sys\n"
        "from ed_elarge.__main__ import app\n"
        f"app([{str(PRETRAIN)!r}, '--dry-run'], standalone_mode=False)\n"
        "heavy = {'jax', 'jaxlib', 'flax', 'transformers', 'datasets', 'torch', 'lm_eval'}\n"
        "heavy.add('numpy')\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []"
    assert "2. train: train the model" in done.stdout


@pytest.mark.parametrize("module", ["ed_elarge", "easydel.scripts.elarge"])
@pytest.mark.daily("ed_elarge")
def test_bad_input_is_one_message_and_exit_code_2(tmp_path: Path, module: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("trainer: {learning_ratee: 1}\nactions: [train]\n")
    done = elarge(str(path), module=module)
    assert done.returncode == 2
    assert f"error: {path}:1:11: trainer.learning_ratee:" in done.stderr
    assert "did you mean 'learning_rate'?" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.nightly
def test_verbose_flag_prints_traceback(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("trainr: {}\n")
    done = elarge("--config", str(path), "--verbose")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert "did you mean 'trainer'?" in done.stderr


@pytest.mark.nightly
def test_invalid_usage_exits_with_code_two(tmp_path: Path) -> None:
    assert elarge("run").returncode == 2
    assert elarge("a.yaml", "--config", "b.yaml").returncode == 2
    missing = elarge(str(tmp_path / "none.yaml"))
    assert missing.returncode == 2
    assert "no such file" in missing.stderr
    shown = elarge("--help")
    assert shown.returncode == 0
    assert "--dry-run" in shown.stdout


@pytest.mark.nightly
def test_light_actions_run_without_jax(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    saved = tmp_path / "deep" / "saved.yaml"
    text = PRETRAIN.read_text().split("actions:")[0]
    actions = f"actions: [validate, show, print_config, {{save_yaml: {saved}}}]\n"
    path.write_text(text + actions)
    done = elarge(str(path))
    assert done.returncode == 0, done.stderr
    assert "a new llama" in done.stdout
    again = elarge(str(saved), "--dry-run")
    assert again.returncode == 0, again.stderr
