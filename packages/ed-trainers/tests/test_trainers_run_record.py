"""The record of a run is written only by a run that trains, and finished runs keep their values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ed_infra.errors import CheckpointError
from ed_trainers import SFTArguments, SFTTrainer
from ed_trainers.arguments import METHODS
from ed_trainers.checkpoints.run_record import RUN_FILES, compare_runs, describe_run

MODEL = {
    "class": "Llama",
    "config": {"rope_theta": 1e4, "transformers_version": "5.1", "easydel": {"a": 1}},
}
SETTINGS = {"lora.alpha": 16, "model.name_or_path": "a"}


def describe(**changes: Any) -> dict[str, Any]:
    method = changes.pop("method", "sft")
    facts = {
        "total_steps": 3,
        "model": MODEL,
        "settings": {"lora.alpha": 16, "model.name_or_path": "a"},
    }
    facts |= {name: changes.pop(name) for name in [*facts, "param_dtype"] if name in changes}
    arguments = METHODS[method].arguments(**changes)
    return describe_run(arguments, loader={}, fingerprint="x", **facts)


def compare(saved: dict[str, Any], run: dict[str, Any], step: int) -> str | None:
    return compare_runs(saved, run, "runs/a/checkpoints/3", lambda loader: "the data differ", step)


OTHER_VALUES: list[tuple[str, Any, Any]] = [
    ("learning_rate", {}, {"learning_rate": 1.0}),
    ("ema_decay", {}, {"ema_decay": 0.5}),
    ("beta", {"method": "dpo"}, {"method": "dpo", "beta": 0.7}),
    ("loss_type", {"method": "dpo"}, {"method": "dpo", "loss_type": "ipo"}),
    ("max_training_steps", {}, {"total_steps": 2}),
    ("param_dtype", {"param_dtype": "float32"}, {"param_dtype": "bfloat16"}),
    ("model.config.rope_theta", {}, {"model": {"class": "Llama", "config": {"rope_theta": 5e5}}}),
    ("lora.alpha", {}, {"settings": {"lora.alpha": 8, "model.name_or_path": "a"}}),
    ("model.name_or_path", {}, {"settings": {"lora.alpha": 16, "model.name_or_path": "b"}}),
]


@pytest.mark.parametrize(("key", "before", "now"), OTHER_VALUES, ids=[o[0] for o in OTHER_VALUES])
def test_finished_run_refuses_every_other_value_and_lists_it(key, before, now) -> None:
    saved, run = describe(**before), describe(**now)
    with pytest.raises(CheckpointError) as error:
        compare(saved, run, 3)
    text = str(error.value)
    shown = "total steps 3 -> 2" if key == "max_training_steps" else key
    assert "finished with other values" in text and shown in text
    assert "another save_directory" in text and "more than 3 steps" in text
    # A run with steps left trains on with the present values, and says which ones changed.
    longer = compare(saved, {**run, "total_steps": 9}, 3)
    assert longer is not None and "total steps 3 -> 9" in longer
    assert key == "max_training_steps" or key in longer


@pytest.mark.parametrize(
    "change",
    [
        {"log_steps": 1},
        {"save_total_limit": 2},
        {"save_directory": "elsewhere"},
        {"report_to": ()},
        {"lmhead_chunksize": 64},
        {"model": {"class": "Llama", "config": {"rope_theta": 1e4, "transformers_version": "6"}}},
        {"model": {"class": "Llama", "config": {"rope_theta": 1e4, "easydel": {"a": 2}}}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_values_without_influence_on_the_result_may_change(change) -> None:
    assert compare(describe(), describe(**change), 3) is None


def test_record_of_an_earlier_version_is_equal() -> None:
    earlier = describe()
    del earlier["settings"], earlier["model"]
    assert compare(earlier, describe(), 3) is None


def train(toy, directory: Path, **options: Any):
    arguments = SFTArguments(
        save_directory=str(directory),
        **{"total_batch_size": 8, "max_training_steps": 2, "use_tensorboard": False, **options},
    )
    return SFTTrainer(arguments, model=toy.model(), train_dataset=toy.loader()).train()


def test_repeated_run_with_another_learning_rate_changes_no_file(toy, tmp_path) -> None:
    assert train(toy, tmp_path).trained_steps == 2
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(CheckpointError, match=r"learning_rate 2e-05 -> 0\.01"):
        train(toy, tmp_path, learning_rate=0.01)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    page = (tmp_path / "report.html").stat().st_mtime_ns
    assert train(toy, tmp_path).trained_steps == 0
    assert (tmp_path / "report.html").stat().st_mtime_ns == page


@pytest.mark.nightly
def test_new_run_moves_every_file_of_the_earlier_run_aside(toy, tmp_path) -> None:
    train(toy, tmp_path, max_training_steps=1)
    for name in RUN_FILES:
        if not (tmp_path / name).exists():
            (tmp_path / name).write_text("of the earlier run")
    train(toy, tmp_path, max_training_steps=1, resume_if_possible=False, learning_rate=0.01)
    assert {path.name for path in (tmp_path / "earlier-1").iterdir()} == set(RUN_FILES)
    assert not (tmp_path / "summary.json").exists()
