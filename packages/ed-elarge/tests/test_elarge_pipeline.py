"""A run file from data to a trained and evaluated model, and errors before training."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from ed_elarge.config import nodes
from ed_elarge.config.normalize import normalize
from ed_elarge.errors import InputError
from run_files import run, small, with_texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_texts(tmp_path_factory.mktemp("pipeline"))


@pytest.mark.xdist_group("elarge-pipeline")
def test_from_nothing_to_a_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(small(folder)) == 0
    shown = capsys.readouterr().out
    directory = folder / "run"

    assert "held-out cross-entropy" in shown
    assert "Next commands" in shown
    summary = json.loads((directory / "summary.json").read_text())
    learned = summary["learned"]
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    evaluated = next(row for row in rows if "eval_loss" in row)
    # the summary's own measure, and the trainer's
    assert learned["cross_entropy"] == pytest.approx(evaluated["eval_loss"], rel=1e-5)
    assert learned["tokens"] == evaluated["eval_tokens"]
    assert [sample["prompt"] for sample in summary["samples"]] == ["The ", "A "]
    assert set(summary["evaluation"]) == {"heldout_perplexity", "heldout_cloze"}
    results = json.loads((directory / "eval" / "results.json").read_text())
    assert results["results"]["heldout_cloze"]["sample_len"] == 3

    # the written run file serves the trained model
    serve = normalize(nodes.read_yaml(directory / "serve.yaml"), require_actions=True)
    assert serve.model is not None
    assert Path(str(serve.model.name_or_path), "config.json").is_file()


@pytest.mark.nightly
def test_training_run_writes_samples_and_benchmark_results(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Previews of held-out texts, and tasks of lm-eval by an engine that borrows the weights."""
    pytest.importorskip("lm_eval")
    settings = small(folder, actions=["train"])
    settings["eval"] = {"limit": 3}
    looks = {
        "generation_interval": 2,
        "generation_max_new_tokens": 4,
        "benchmark_interval": 2,
        "benchmarks": ["heldout_perplexity"],
    }
    settings["trainer"] |= {"save_directory": str(tmp_path / "run"), **looks}
    assert run(settings) == 0
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows if "samples" in row] == [2, 3]
    name = "benchmark/heldout_perplexity/bits_per_byte"
    measured = {row["step"]: row[name] for row in rows if name in row}
    assert list(measured) == [2, 3] and measured[2] != measured[3]
    for step in measured:
        kept = json.loads((tmp_path / f"run/benchmarks/{step}.json").read_text())
        assert kept["results"]["heldout_perplexity"]["bits_per_byte,none"] == measured[step]
    shown = capsys.readouterr().out
    assert f"step 3: heldout_perplexity/bits_per_byte {measured[3]:.4g}" in shown
    assert "step 3: '" in shown and " continues '" in shown


@pytest.mark.xdist_group("elarge-pipeline")
@pytest.mark.nightly
def test_rerun_of_finished_run_does_not_train(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = folder / "run" / "metrics.jsonl"
    if not metrics.exists():
        run(small(folder, actions=["train"]))
    before = metrics.read_text()
    assert run(small(folder, actions=["train"])) == 0
    shown = capsys.readouterr().out
    assert "the training had already finished (3 steps)" in shown
    assert "training a tokenizer" not in shown.split("finished before")[0].splitlines()[-3:]
    assert metrics.read_text() == before


BEFORE_TRAINING: list[tuple[dict[str, Any], str, str]] = [
    (
        {"trainer": {"benchmark_interval": 2, "benchmarks": ["heldout_perplexit"]}},
        "trainer.benchmarks[0]",
        "did you mean 'heldout_perplexity'",
    ),
    (
        {"sharding": {"axis_dims": [3, 1, 1, 1, 7]}},
        "sharding.axis_dims",
        "21",
    ),
    (
        {"actions": ["train", {"eval": {"tasks": ["no_such_task"]}}]},
        "actions[1].eval",
        "unknown task 'no_such_task'",
    ),
]


@pytest.mark.daily("changes0*", "changes1*")
@pytest.mark.parametrize(("changes", "where", "words"), BEFORE_TRAINING)
def test_late_failures_are_reported_before_training(
    folder: Path, changes: dict[str, Any], where: str, words: str
) -> None:
    settings = small(folder, **changes)
    settings["trainer"]["save_directory"] = str(folder / "never")
    with pytest.raises(InputError) as error:
        run(settings)
    assert where in str(error.value)
    assert words in str(error.value)
    assert str(error.value).startswith("run.yaml:")
    assert not (folder / "never" / "metrics.jsonl").exists()


def test_a_port_that_is_taken_is_found_first(folder: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=f"cannot listen on 127.0.0.1:{port}"):
            run(small(folder, actions=["train", {"serve": {"port": port}}]))


def test_data_that_is_not_there_is_blamed_with_its_place(folder: Path) -> None:
    settings = small(folder, actions=["train"])
    settings["mixture"]["informs"] = [{"data_files": str(folder / "none.jsonl")}]
    with pytest.raises(InputError, match=r"run\.yaml:\d+:\d+: .*none\.jsonl"):
        run(settings)
    settings["mixture"]["informs"] = [
        {"data_files": str(folder / "texts.jsonl"), "content_field": "txt"}
    ]
    with pytest.raises(InputError, match="did you mean 'text'"):
        run(settings)
