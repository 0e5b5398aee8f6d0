"""`elarge forget` and `elarge branch` equal runs from the start, to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from ed_elarge.command.main import app
from ed_infra.testing import english_topics
from run_files import small
from safetensors.numpy import load_file
from typer.testing import CliRunner

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]

STEPS = 6


def elarge(*words: object) -> dict[str, Any]:
    """Run a command with `--json` and return its object."""
    done = CliRunner().invoke(app, [*map(str, words), "--json"])
    values = json.loads(done.stdout)
    assert done.exit_code == 0, (values, done.stderr, done.exception)
    return values


def refuse(*words: object) -> str:
    """Run a command that is refused and return the message."""
    done = CliRunner().invoke(app, [*map(str, words), "--json"])
    assert done.exit_code == 2, (done.stdout, done.exception)
    return json.loads(done.stdout)["error"]


def write_rows(folder: Path, kind: str) -> None:
    texts = sorted(english_topics().values(), key=len)[20:60]
    rows: list[dict[str, Any]] = [{"text": text, "user": n % 5} for n, text in enumerate(texts)]
    if kind == "dpo":
        rows = [
            {"prompt": t[:20], "chosen": t[20:90], "rejected": t[90:150], "user": n % 5}
            for n, t in enumerate(texts)
        ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(folder: Path, tokenizer: Path, kind: str, **trainer: Any) -> Path:
    """Write the run file of a small run, and return its path."""
    write_rows(folder, kind)
    values = small(folder, actions=["train"])
    values["model"]["tokenizer"] = str(tokenizer)
    inform: dict[str, Any] = {"data_files": str(folder / "rows.jsonl")}
    values["mixture"] |= {"informs": [inform], "shuffle_buffer_size": 8}
    del values["mixture"]["eval_fraction"]
    if kind == "dpo":
        values["mixture"] |= {"pack_tokens": False, "pack_seq_length": None}
        values["trainer"] |= {"trainer_type": "dpo", "max_length": 96}
        values["reference_model"] = {"name_or_path": str(tokenizer)}
        values["model"] = {"name_or_path": str(tokenizer)}
    else:
        inform["content_field"] = "text"
    if kind == "lora":
        values["model"] = {"name_or_path": str(tokenizer)}
        values["lora"] = {"rank": 4}
    values["trainer"] |= {
        "max_training_steps": STEPS,
        "save_steps": 2,
        "log_steps": 1,
        "scheduler": "cosine",
        "warmup_steps": 2,
        **trainer,
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


def read_arrays(directory: Path) -> dict[str, np.ndarray]:
    """Return the arrays of the trained model and, if there is one, of its adapter."""
    return {
        f"{path.parent.name}/{name}": array
        for folder in ("model", "adapter")
        for path in sorted((directory / folder).glob("*.safetensors"))
        for name, array in load_file(path).items()
    }


def assert_equal(first: Path, second: Path) -> None:
    one, other = read_arrays(first), read_arrays(second)
    assert one
    assert one.keys() == other.keys()
    different = [name for name in one if not np.array_equal(one[name], other[name])]
    assert not different
    assert read_losses(first) == read_losses(second)


def read_losses(directory: Path) -> list[tuple[int, float, float]]:
    rows = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


def choose_late_row(folder: Path) -> int:
    """Return the number of a row that the steps after the first checkpoint use first."""
    rows = range(len((folder / "rows.jsonl").read_text().splitlines()))
    words = [word for row in rows for word in ("--rows", row)]
    plan = elarge("forget", folder / "run", *words, "--dry-run")
    first = {row["row"]: row["steps"][0] for row in plan["rows"] if row["steps"]}
    return next(row for row, step in first.items() if step in (3, 4))


@pytest.mark.parametrize("kind", ["sft", "dpo", "lora"])
def test_forgotten_rows_leave_the_model_of_a_run_without_them(
    tmp_path: Path, quickstart_model: Path, kind: str
) -> None:
    file = write_run(tmp_path, quickstart_model, kind)
    elarge("train", file)
    row = choose_late_row(tmp_path)
    plan = elarge("forget", tmp_path / "run", "--rows", row, "--dry-run")
    assert plan["checkpoint"] == 2
    assert plan["replayed_steps"] == STEPS - 2
    assert plan["predicted_seconds"] > 0
    assert not (tmp_path / "run-forgotten").exists()
    record = elarge("forget", tmp_path / "run", "--rows", row)
    whole = tmp_path / "whole"
    config = tmp_path / "run-forgotten" / "config.yaml"
    elarge("train", config, "--set", f"trainer.save_directory={whole}")
    assert_equal(tmp_path / "run-forgotten", whole)
    assert (
        read_losses(whole)[: plan["first_step"] - 1]
        == (read_losses(tmp_path / "run")[: plan["first_step"] - 1])
    )
    assert read_losses(whole) != read_losses(tmp_path / "run")
    stored = json.loads((tmp_path / "run-forgotten" / "forgotten.json").read_text())
    assert stored["rows"] == plan["rows"]
    assert stored["complete"]
    assert record["seconds"] > 0


def test_rows_are_selected_by_field_and_by_file_and_refused_with_a_way_out(
    tmp_path: Path, quickstart_model: Path
) -> None:
    file = write_run(tmp_path, quickstart_model, "sft", max_training_steps=2, save_steps=None)
    elarge("train", file)
    run = tmp_path / "run"
    by_field = elarge("forget", run, "--rows", "user=3", "--dry-run")
    assert [row["row"] % 5 for row in by_field["rows"]] == [3] * 8
    assert by_field["checkpoint"] == 0
    rows = (tmp_path / "rows.jsonl").read_text().splitlines()
    (tmp_path / "some.jsonl").write_text("\n".join(rows[3::5]) + "\n")
    by_file = elarge("forget", run, "--rows", tmp_path / "some.jsonl", "--dry-run")
    assert {row["hash"] for row in by_file["rows"]} == {row["hash"] for row in by_field["rows"]}
    assert "selects no rows" in refuse("forget", run, "--rows", "nothing", "--dry-run")
    (tmp_path / "hashes.json").write_text(json.dumps(["0" * 16]))
    message = refuse("train", file, "--set", f"mixture.exclude={tmp_path / 'hashes.json'}")
    assert "the training data does not contain" in message
    for setting in ("mixture.streaming=true", "mixture.save={path: saved}"):
        settings = ("--set", setting, "--set", f"mixture.exclude={tmp_path / 'hashes.json'}")
        assert "exclude" in refuse("train", file, *settings)


def test_branch_without_changes_equals_its_parent(tmp_path: Path, quickstart_model: Path) -> None:
    elarge("train", write_run(tmp_path, quickstart_model, "sft"))
    record = elarge("branch", tmp_path / "run", "--at", 3)
    assert (record["checkpoint"], record["replayed_steps"]) == (2, 1)
    assert record["changes"] == {}
    assert record["replay_differences"] == []
    assert_equal(tmp_path / "run", tmp_path / "run-3")


def test_branch_with_another_learning_rate_equals_a_schedule_that_changes_at_its_step(
    tmp_path: Path, quickstart_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import jax.numpy as jnp
    from ed_trainers import trainer as trainers

    prompts = {"generation_interval": 3, "generation_prompts": ["The "]}
    file = write_run(tmp_path, quickstart_model, "sft", generation_max_new_tokens=4, **prompts)
    elarge("train", file)
    settings = ("--set", "trainer.learning_rate=0.01", "--set", "trainer.weight_decay=0.1")
    record = elarge("branch", tmp_path / "run", "--at", 3, *settings)
    assert record["changes"] == {
        "trainer.learning_rate": [0.003, 0.01],
        "trainer.weight_decay": [0.01, 0.1],
    }
    assert {"at_branch", "at_end"} <= record["samples"][0].keys()
    page = (tmp_path / "run-3" / "report.html").read_text()
    assert "parent training" in page
    assert "trainer.learning_rate" in page
    assert "weight_decay: 0.1" in page
    build = trainers.build_schedule

    def build_changing_schedule(arguments: Any, total_steps: int) -> Any:
        before = build(arguments.replace(learning_rate=0.003), total_steps)
        after = build(arguments.replace(learning_rate=0.01), total_steps)
        return lambda count: jnp.where(jnp.asarray(count) < 3, before(count), after(count))

    monkeypatch.setattr(trainers, "build_schedule", build_changing_schedule)
    record = elarge("branch", tmp_path / "run", "--at", 3, *settings[:2], "-o", tmp_path / "rate")
    whole = ("--set", f"trainer.save_directory={tmp_path / 'whole'}")
    elarge("train", file, *whole)
    assert_equal(tmp_path / "rate", tmp_path / "whole")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("trainer.seed=7", "determines the steps before the branch"),
        ("trainer.optimizer=lion", "determines the steps before the branch"),
        ("mixture.pack_seq_length=32", "determines the steps before the branch"),
        ("model.config.hidden_size=64", "determines the steps before the branch"),
        ("trainer.save_directory=other", "--output"),
        ("trainer.max_training_steps=1", "ends before the branch"),
    ],
)
def test_key_that_changes_the_past_of_a_branch_is_refused(
    trained_run: Path, setting: str, words: str
) -> None:
    message = refuse("branch", trained_run, "--at", 1, "--set", setting)
    assert words in message
    assert setting.partition("=")[0].rpartition(".")[2] in message


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory, quickstart_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("branches")
    steps = {"max_training_steps": 2, "save_steps": None}
    elarge("train", write_run(folder, quickstart_model, "sft", **steps))
    return folder / "run"
