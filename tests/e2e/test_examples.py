"""Each example that trains in seconds runs unchanged, from the root of a copy."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from ed_elarge.actions.execution import execute
from ed_elarge.certify.receipt import findings
from ed_elarge.certify.subject import CertifiedModel
from ed_elarge.config import nodes
from ed_elarge.config.normalize import normalize
from ed_trainers.arguments import METHODS

from tools.bench import tool_use

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
#: Examples with separate tests: see test_main_job.py.
ELSEWHERE = {"quickstart", "pretrain", "serve", "draft_smollm2"}
#: Name -> a metric of the last evaluation, and its bounds.
LEARNED = {
    "sft": ("eval_loss", 0, 1.4),
    "dpo": ("eval_rewards/accuracies", 0.9, 1),
    "orpo": ("eval_rewards/accuracies", 0.9, 1),
    "tpo": ("eval_rewards/accuracies", 0.9, 1),
    "cpo": ("eval_rewards/accuracies", 0.9, 1),
    "simpo": ("eval_rewards/accuracies", 0.9, 1),
    "kto": ("eval_rewards/chosen", 0.5, 99),
    "bco": ("eval_rewards/chosen", 0.5, 99),
    "reward": ("eval_accuracy", 0.9, 1),
    "prm": ("eval_accuracy", 0.85, 1),
    "distillation": ("eval_distillation_loss", 0, 0.15),
    "seq_kd": ("eval_loss", 0, 1.5),
    "embedding": ("eval_accuracy", 0.2, 1),
    "mlm": ("eval_loss", 0, 5.1),
    "sequence_classification": ("eval_accuracy", 0.9, 1),
    "token_classification": ("eval_f1", 0.9, 1),
    "cross_encoder": ("eval_accuracy", 0.9, 1),
    "question_answering": ("eval_exact_match", 0.8, 1),
    "multiple_choice": ("eval_accuracy", 0.9, 1),
    "span_corruption": ("eval_loss", 0, 4.5),
    "seq2seq_sft": ("eval_loss", 0, 1.0),
    "seq2seq_dpo": ("eval_rewards/accuracies", 0.9, 1),
    "image_classification": ("eval_accuracy", 0.9, 1),
    "contrastive": ("eval_accuracy", 0.4, 1),
    "ctc": ("eval_wer", 0, 0.1),
    "whisper": ("eval_wer", 0, 0.3),
    "grpo": ("eval_reward", 0.9, 1),
    "dapo": ("eval_reward", 0.8, 1),
    "gspo": ("eval_reward", 0.9, 1),
    "gfpo": ("eval_reward", 0.9, 1),
    "sdpo": ("eval_reward", 0.8, 1),
    "rloo": ("eval_reward", 0.8, 1),
    "rlvr": ("eval_reward", 0.4, 1.5),
    "ppo": ("eval_reward", 0.6, 1),
    "gkd": ("eval_loss", 0, 0.05),
    "on_policy_distillation": ("eval_loss", 0, 0.05),
    "sparse_distillation": ("eval_loss", 0, 0.05),
    "iw_opd": ("eval_kl", -0.1, 0.3),
    "sdft": ("eval_loss", 0, 0.5),
    "draft": ("eval_acceptance_length", 2.5, 4),
    "xpo": ("eval_reward", 0.9, 1),
    "nash_md": ("eval_reward", 3.5, 4),
    "chat_lora": ("eval_loss", 0, 3.0),
}
#: Further examples of a method.
MORE = {"chat_lora", "dapo", "seq2seq_sft", "seq2seq_dpo", "whisper"}
#: Examples that run by default.
DAILY = ("dpo",)
#: Examples that start with the model of examples/pretrain.yaml.
TEACHES = (
    "distillation",
    "seq_kd",
    "gkd",
    "on_policy_distillation",
    "sparse_distillation",
    "iw_opd",
    "sdft",
    "draft",
    "chat_lora",
)


def test_every_method_has_an_example() -> None:
    written = {file.stem for file in EXAMPLES.glob("*.yaml")} - ELSEWHERE
    assert written == {*METHODS} | MORE == {*LEARNED}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a small version of examples/pretrain.yaml, and return the folder of its model."""
    folder = tmp_path_factory.mktemp("teacher")
    run: dict[str, Any] = yaml.safe_load((EXAMPLES / "pretrain.yaml").read_text())
    run["model"]["config"] |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    run["model"]["tokenizer"]["train"]["vocab_size"] = 400
    run["mixture"] |= {"pack_seq_length": 64}
    run["trainer"] |= {"max_training_steps": 40, "warmup_steps": 5, "save_steps": 40}
    run["trainer"] |= {"evaluation_steps": 40}
    run["actions"] = ["train"]
    before = Path.cwd()
    os.chdir(folder)
    try:
        text = yaml.safe_dump(run)
        run_file = normalize(nodes.parse_yaml(text, "teacher.yaml"), require_actions=True)
        assert execute(run_file).code == 0
    finally:
        os.chdir(before)
    return folder / "runs" / "pretrain" / "model"


@pytest.mark.parametrize("name", [*LEARNED, *sorted(ELSEWHERE)])
def test_example_is_valid_without_warnings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run = normalize(nodes.read_yaml(EXAMPLES / f"{name}.yaml"), require_actions=True)
    assert not run.warnings, run.warning_texts()


@pytest.mark.parametrize("name", ["warm_up", "grpo"])
def test_example_of_a_tool_is_valid_without_warnings(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    run = normalize(nodes.read_yaml(EXAMPLES / "tool_use" / f"{name}.yaml"), require_actions=True)
    assert not run.warnings, run.warning_texts()


def test_rows_of_the_tool_are_those_of_the_generator() -> None:
    rows = tool_use.build_rows()
    for name, written in rows.items():
        lines = (EXAMPLES / "tool_use" / name).read_text("utf-8").splitlines()
        assert [json.loads(line) for line in lines] == written
    items = [{row["item"] for row in rows[f"{name}.jsonl"]} for name in ("questions", "heldout")]
    assert not items[0] & items[1]
    numbers = [{"reward": 0.25, "step": step} for step in range(1, 11)]
    figures = tool_use.summarize([{"step": 0, "eval_reward": 0.5}, *numbers])
    assert figures == {"rewards": [0.25] * 5, "held_out": {0: (0.5, 0.112)}}


@pytest.mark.nightly
def test_online_example_trains_for_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(EXAMPLES / "data", tmp_path / "examples" / "data")
    monkeypatch.chdir(tmp_path)
    run: dict[str, Any] = yaml.safe_load((EXAMPLES / "grpo.yaml").read_text())
    run["trainer"] |= {"max_training_steps": 2, "total_batch_size": 16}
    text = yaml.safe_dump(run)
    assert execute(normalize(nodes.parse_yaml(text, "grpo.yaml"), require_actions=True)).code == 0
    assert Path("runs/grpo/model/config.json").is_file()


@pytest.mark.nightly
@pytest.mark.parametrize("name", LEARNED)
def test_output_of_an_example_fails_no_check_of_its_certificate(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    shutil.copytree(EXAMPLES / "data", tmp_path / "examples" / "data")
    if name in TEACHES:
        model = request.getfixturevalue("teacher")
        shutil.copytree(model, tmp_path / "runs" / "pretrain" / "model")
    monkeypatch.chdir(tmp_path)
    run: dict[str, Any] = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    run["trainer"] |= {"max_training_steps": 2, "warmup_steps": 0, "evaluation_steps": 2}
    run["actions"] = ["train"]
    text = yaml.safe_dump(run)
    run_file = normalize(nodes.parse_yaml(text, f"{name}.yaml"), require_actions=True)
    assert execute(run_file).code == 0
    found = list(findings(CertifiedModel(Path("runs", name))))
    assert not [f for f in found if f.status == "failed" and f.name != "kernels"]
    assert sum(f.status == "passed" for f in found) >= 6


@pytest.mark.nightly
@pytest.mark.parametrize("name", LEARNED)
def test_example_runs_and_reaches_expected_metric(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Any,
    request: pytest.FixtureRequest,
) -> None:
    shutil.copytree(EXAMPLES / "data", tmp_path / "examples" / "data")
    if name in TEACHES:
        model = request.getfixturevalue("teacher")
        shutil.copytree(model, tmp_path / "runs" / "pretrain" / "model")
    monkeypatch.chdir(tmp_path)
    run = normalize(nodes.read_yaml(EXAMPLES / f"{name}.yaml"), require_actions=True)
    assert not run.warnings, run.warning_texts()
    assert execute(run).code == 0
    summary = json.loads(Path("runs", name, "summary.json").read_text())
    figure, least, most = LEARNED[name]
    value = summary["metrics"][figure]
    record_property("summary", f"examples/{name}.yaml: {figure} {value:.3f}")
    assert least <= value <= most
    assert Path("runs", name, "model", "config.json").is_file()
