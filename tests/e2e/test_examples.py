"""The examples that train in seconds: each file as it is, from the root of a copy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from ed_elarge import nodes
from ed_elarge.actions import execute
from ed_elarge.normalize import normalize
from ed_trainers.arguments import METHODS

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
#: The main job and its server have tests of their own, beside this one.
ELSEWHERE = {"quickstart", "serve"}
#: What a method is seen to have learned in its example: a figure of the last evaluation, its least
#: value.
LEARNED = {
    "dpo": ("eval_rewards/accuracies", 0.9),
    "orpo": ("eval_rewards/accuracies", 0.9),
    "cpo": ("eval_rewards/accuracies", 0.9),
    "simpo": ("eval_rewards/accuracies", 0.9),
    "kto": ("eval_rewards/chosen", 0.5),
    "bco": ("eval_rewards/chosen", 0.5),
    "reward": ("eval_accuracy", 0.9),
    "prm": ("eval_accuracy", 0.75),
}


def test_every_method_has_an_example() -> None:
    written = {file.stem for file in EXAMPLES.glob("*.yaml")} - ELSEWHERE
    assert written == {*METHODS} - {"sft"} == {*LEARNED}


@pytest.mark.parametrize("name", LEARNED)
def test_it_runs_and_learns(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property
) -> None:
    shutil.copytree(EXAMPLES / "data", tmp_path / "examples" / "data")
    monkeypatch.chdir(tmp_path)
    run = normalize(nodes.read(EXAMPLES / f"{name}.yaml"), require_actions=True)
    assert not run.warnings, run.warning_texts()
    assert execute(run) == 0
    summary = json.loads(Path("runs", name, "summary.json").read_text())
    figure, least = LEARNED[name]
    value = summary["metrics"][figure]
    record_property("summary", f"examples/{name}.yaml: {figure} {value:.3f}")
    assert value >= least
    assert Path("runs", name, "model", "config.json").is_file()
