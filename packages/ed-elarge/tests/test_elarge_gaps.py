"""Values that passed unnoticed: each is an error or a warning at its key."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ed_elarge.config import nodes
from ed_elarge.config.checks import advice, machine
from ed_elarge.config.normalize import normalize
from ed_elarge.config.run_config import RunConfig
from ed_elarge.config.table import ACTIONS
from ed_elarge.errors import InputError
from ed_infra.errors import ConfigError
from run_files import with_changes


def read(**changes: Any) -> RunConfig:
    return normalize(nodes.parse_yaml(json.dumps(with_changes(**changes)), "r.yaml"))


MESHES = [
    ("base_config__values__sharding_axis_dims", [1]),
    ("base_config__values__axis_dims", [1, 1, 1, 1, 1, 1]),
    ("base_config__values__sharding_axis_names", ["dp"]),
    ("base_config__values__sharding_dcn_axis_dims", [1]),
    ("model__config__sharding_axis_dims", [1]),
    ("model__config__sharding_axis_names", ["dp", "tp"]),
]
REFUSED: list[tuple[str, Any, str]] = [
    ("model__tokenizer", "", "at least 1 character"),
    ("model__tokenizer__name_or_path", "", "at least 1 character"),
    ("mixture__save", {"path": "x", "max_shard_size": -1}, "greater than 0"),
    ("mixture__save", {"path": "x", "max_shard_size": 0}, "greater than 0"),
    ("mixture__save", {"path": "x", "max_shard_size": "0MB"}, "greater than 0"),
    *((key, value, "set one size for each axis") for key, value in MESHES),
    ("trainer__beeta", 0.1, "did you mean 'beta'? (a key of dpo, "),
    ("trainer__num_generatons", 4, "did you mean 'num_generations'? (a key of grpo, "),
    ("trainer__reward_function", [], "did you mean 'reward_functions'?"),
    ("trainer__lerning_rate", 1.0, "did you mean 'learning_rate'?"),
]


@pytest.mark.parametrize(("key", "value", "words"), REFUSED)
def test_broken_value_is_an_error_at_its_key(key: str, value: Any, words: str) -> None:
    changes = {"model__tokenizer": {}} if key.startswith("model__tokenizer__") else {}
    with pytest.raises(InputError) as error:
        read(**changes, **{key: value})
    where = key.replace("__", ".").replace("name_or_path", "")
    assert where.split(".")[0] in str(error.value) and where.split(".")[-1] in str(error.value)
    assert words in str(error.value)


@pytest.mark.parametrize("scheduler", ["linear", "cosine", "polynomial", "wsd"])
def test_learning_rate_does_not_rise_at_the_end(scheduler: str) -> None:
    values = {"trainer__scheduler": scheduler, "trainer__learning_rate": 1e-4}
    with pytest.raises(InputError, match=r"is above learning_rate 0\.0001"):
        read(**values, trainer__learning_rate_end=1e-3)
    read(**values, trainer__learning_rate_end=1e-4)


def test_packing_on_the_fly_without_packing_is_a_warning() -> None:
    def show(**changes: Any) -> str:
        return "".join(read(mixture__pack_on_the_fly=True, **changes).warning_texts())

    assert "set pack_tokens: true" in show(mixture__pack_tokens=False)
    assert "pack_on_the_fly:" not in show()


def test_every_action_that_uses_the_model_warns_when_it_is_not_saved() -> None:
    users = {name for name, kind in ACTIONS.items() if kind.prepare} - {"train"}
    assert set(advice._AFTER_TRAINING) == users
    run = read(trainer__do_last_save=False, actions=["train", "generate"])
    assert "the trained model is not saved: generate" in "".join(run.warning_texts())


def test_mesh_of_base_config_is_compared_with_the_devices() -> None:
    run = read(base_config__values__sharding_axis_dims=[3, 7, 1, 1, 1])
    problems = list(machine.device_warnings(run))
    assert [p.path for p in problems] == [("base_config", "values", "sharding_axis_dims")]
    assert "needs 21 devices" in problems[0].message


NO_HELD_OUT = {"mixture__eval_fraction": ...}
STEPS = {"trainer__evaluation_steps": 2, "trainer__save_steps": 2}
STREAM = {"mixture__streaming": True, "mixture__eval_fraction": ...}
PAIRS = {"trainer__trainer_type": "dpo", "mixture__pack_tokens": False}
LATE: list[tuple[str, str, dict[str, Any]]] = [
    (
        "trainer.load_best_model_at_end",
        "no rows are held out",
        {**NO_HELD_OUT, **STEPS, "trainer__load_best_model_at_end": True},
    ),
    ("trainer.save_best_k", "are held out", {**NO_HELD_OUT, **STEPS, "trainer__save_best_k": 1}),
    (
        "trainer.generation_interval",
        "set generation_prompts",
        {**NO_HELD_OUT, "trainer__generation_interval": 2},
    ),
    ("mixture.streaming", "set trainer.max_training_steps", STREAM),
    (
        "trainer.precompute_ref_log_probs",
        "reads all rows before training",
        {
            **STREAM,
            **PAIRS,
            "trainer__max_training_steps": 3,
            "trainer__precompute_ref_log_probs": True,
        },
    ),
    (
        "trainer.image_feature_cache_gib",
        "reads no images",
        {"trainer__image_feature_cache_gib": 1.0},
    ),
]


@pytest.mark.parametrize(("key", "words", "changes"), LATE, ids=[case[0] for case in LATE])
def test_error_of_the_trainer_appears_in_a_dry_run(
    key: str, words: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(InputError) as error:
        read(**changes)
    assert f"{key}: " in str(error.value) and words in str(error.value)


def test_missing_tracker_is_an_error_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    problems = list(machine.trackers(read(trainer__report_to=["wandb", "mlflow"])))
    assert [problem.path for problem in problems] == [
        ("trainer", "report_to", 0),
        ("trainer", "report_to", 1),
    ]
    assert "pip install 'ed-trainers[wandb]'" in problems[0].message


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ("generation_prompts: 'x' has no tokens", "trainer.seed"),
        ("mini_batch_size 3 does not divide; lower learning_rate", "trainer.learning_rate"),
        ("the lr is invalid: total_batch_size is 8", "trainer.total_batch_size"),
    ],
)
def test_error_while_training_is_located_at_the_option_that_it_names(
    message: str, where: str
) -> None:
    run = read(trainer__learning_rate=1e-3)
    with pytest.raises(InputError) as error, run.blame_trainer(("trainer", "seed")):
        raise ConfigError(message)
    assert f"{where}: {message}" in str(error.value)
