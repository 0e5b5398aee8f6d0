"""The table of EasyDeL's keys beside the installed original, and run files of each method.

`EASYDEL_PYTHON` is an interpreter with the original `easydel`, and `EASYDEL_REPOSITORY` is a work
tree or a git directory of its repository. Tests that need them are skipped without them.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ed_elarge.command.runs import run_file
from ed_elarge.config import reference
from ed_infra.easydel_keys import easydel_keys
from ed_infra.easydel_translation import find_entry
from ed_trainers.arguments import ARGUMENTS

from tools import easydel_beside
from tools.workspace import ROOT

#: Fields that no user sets, and methods without a place here (docs/migrate/easydel.md).
INTERNAL = ("_can_log_metrics", "_im_a_hidden_checkpoint_manager", "loss_config")
NOT_HERE = ("agentic_moshpit",)
#: Sections whose keys are those of `from_pretrained`, or that the original does not check.
UNCHECKED = ("model", "reference_model", "reward_model", "teacher_model")


@pytest.fixture(scope="module")
def original() -> dict[str, Any]:
    python = os.environ.get("EASYDEL_PYTHON")
    if not python:
        pytest.skip("EASYDEL_PYTHON is not set")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [python, str(ROOT / "tools/easydel/list_keys.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.nightly
def test_every_key_of_the_original_has_a_place(original: dict[str, Any]) -> None:
    keys = dict(original)
    missing = []
    for method, names in keys.pop("trainer").items():
        for name in names if method not in NOT_HERE else ():
            known = any({name} & {*c.model_fields, *c.ALIASES} for c in ARGUMENTS.values())
            if not known and name not in INTERNAL and find_entry("trainer", name, method) is None:
                missing.append(f"trainer.{name} ({method})")
    for section, names in keys.items():
        section = section.split()[0]
        for name in names:
            keys = reference.find_keys((section, *name.split(".")))
            if not keys and not find_entry(section, name):
                missing.append(f"{section}.{name}")
    assert not missing


@pytest.mark.nightly
def test_every_entry_is_a_key_of_the_original(original: dict[str, Any]) -> None:
    keys = dict(original)
    names = {("trainer", name) for group in keys.pop("trainer").values() for name in group}
    names |= {(section.split()[0], name) for section in keys for name in keys[section]}
    rest = {at for at in easydel_keys() if at[0] not in UNCHECKED} - names
    assert {name for _, name in rest} <= {"benchmarks.tasks", "benchmarks.name", "benchmarks.*"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny models and rows."""
    folder = tmp_path_factory.mktemp("beside")
    easydel_beside.write_stand_ins(folder)
    return folder


def repository(folder: Path) -> Path:
    checkout = os.environ.get("EASYDEL_REPOSITORY")
    if not checkout:
        pytest.skip("EASYDEL_REPOSITORY is not set")
    root = folder / "easydel"
    if not root.exists():
        root.mkdir()
        easydel_beside.materialize(Path(checkout), root)
    return root


@pytest.mark.nightly
@pytest.mark.parametrize("title", easydel_beside.ROWS)
def test_configurations_of_the_original_pass_a_dry_run(title: str, folder: Path) -> None:
    root = repository(folder)
    trials = [*easydel_beside.ROWS[title](root)]
    errors = {one.name: easydel_beside.try_dry_run(one, folder) for one in trials}
    failed = {name: error for name, error in errors.items() if error}
    assert trials
    assert all("agentic-moshpit" in error for error in failed.values()), failed


#: Method -> its keys, in the spelling of EasyDeL.
METHODS: dict[str, dict[str, object]] = {
    "sft": {"wandb_entity": None, "packing": True},
    "dpo": {"disable_dropout": False},
    "orpo": {},
    "cpo": {"loss_type": "sigmoid"},
    "kto": {},
    "bco": {"prompt_sample_size": 1024},
    "reward": {"generation_interval": 1},
    "distillation": {"alpha": 0.5, "temperature": 2.0, "logits_chunk_size": 8},
    "gkd": {"lmbda": 0.0},  # the last answers of the conversations complete the prompts
    "on_policy_distillation": {"num_generations_per_prompt": 1},
    "sparse_distillation": {"top_k_teacher": 20, "num_generations_per_prompt": 1},
    "seq_kd": {"num_generations_per_prompt": 1},
    "grpo": {"num_return_sequences": 2, "esurge_page_size": 16},
    "gspo": {"num_return_sequences": 2},
    "gfpo": {"num_generations": 4, "num_remains_in_group": 2},
    "sdpo": {"distillation_type": "jsd", "max_feedback_length": 96, "num_generations": 2},
    "ppo": {"whiten_advantages": True},
    "nash-md": {"mixture_coef": 0.5},
    "xpo": {"loss_type": "sigmoid"},
    "rlvr": {"answer_key": "gold", "num_return_sequences": 2, "max_len_mask": False},
}
ROLES = {
    "teacher": ("distillation", "gkd", "on_policy_distillation", "sparse_distillation", "seq_kd"),
    "reward_model": ("grpo", "gspo", "gfpo", "sdpo", "ppo", "nash-md", "xpo"),
}


def run_config(method: str, folder: Path, save: Path) -> dict[str, Any]:
    """Return a run file of EasyDeL with two steps on tiny data."""
    inform: dict[str, object] = {"type": "json", "data_files": str(folder / "rows.jsonl")}
    if method in ("sft", "distillation", "gkd", "seq_kd"):
        inform["content_field"] = "chosen"
    trainer = {
        "trainer_type": method,
        "max_training_steps": 2,
        "total_batch_size": 2,
        "learning_rate": 1e-4,
        "shuffle_train_dataset": False,
        "use_grain": True,
        "log_steps": 1,
        "save_directory": str(save),
        "progress_bar_type": "json",
        **METHODS[method],
    }
    if method not in ("sft", "reward", "distillation"):
        trainer |= {"max_prompt_length": 32, "max_completion_length": 16}
    config: dict[str, Any] = {
        "model": {"name_or_path": str(folder / "model")},
        "loader": {"dtype": "fp32", "param_dtype": "fp32", "precision": "fastest"},
        "sharding": {"axis_dims": [1, -1, 1, 1, 1], "auto_shard_model": True},
        "mixture": {
            "informs": [inform],
            "batch_size": 2,
            "tokenization": {"max_length": 64},
            "use_sharded_source": True,
            "cache_dir": str(save.parent / "cache"),
        },
        "trainer": trainer,
        "actions": ["validate", "train"],
    }
    for section, methods in ROLES.items():
        if method in methods:
            kind = "reward" if section == "reward_model" else "model"
            config[section] = {"name_or_path": str(folder / kind), "task": "auto-bind"}
    return config


@pytest.mark.nightly
@pytest.mark.parametrize("method", METHODS)
def test_run_file_of_a_method_in_its_spelling_trains(
    method: str, folder: Path, tmp_path: Path
) -> None:
    save = tmp_path / "run"
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run_config(method, folder, save)))
    assert run_file(str(path)) == 0
    rows = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 2
    assert all(math.isfinite(loss) for loss in losses)
