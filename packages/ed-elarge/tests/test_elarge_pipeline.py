"""A run file from nothing to a trained, evaluated and generating model; and what stops it early."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from ed_elarge import nodes
from ed_elarge.actions import execute
from ed_elarge.errors import InputError
from ed_elarge.normalize import normalize
from ed_infra.testing import english_topics


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipeline")
    texts = sorted(english_topics().values(), key=len)[20:40]
    (path / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return path


def config(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 256,
            },
            "tokenizer": {"train": {"vocab_size": 320}},
        },
        "sharding": {"axis_dims": [1, 1, 1, 1, 1]},
        "mixture": {
            "informs": [{"data_files": str(folder / "texts.jsonl"), "content_field": "text"}],
            "eval_fraction": 0.2,
            "pack_tokens": True,
            "pack_seq_length": 64,
            "cache_dir": str(folder / "cache"),
        },
        "trainer": {
            "max_training_steps": 3,
            "total_batch_size": 4,
            "learning_rate": 3e-3,
            "save_directory": str(folder / "run"),
            "use_tensorboard": False,
        },
        "esurge": {
            "max_model_len": 128,
            "max_num_seqs": 4,
            "page_size": 16,
            "max_num_batched_tokens": 64,
            "compile_runner": False,
        },
        "eval": {"tasks": ["heldout_perplexity", "heldout_cloze"], "limit": 3},
        "actions": ["train", "eval", {"generate": {"prompts": ["The ", "A "], "max_tokens": 3}}],
        **changes,
    }


def run(settings: dict[str, Any]) -> int:
    text = yaml.safe_dump(settings, sort_keys=False)
    return execute(normalize(nodes.parse(text, "run.yaml"), require_actions=True))


@pytest.mark.xdist_group("elarge-pipeline")
def test_from_nothing_to_a_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(config(folder)) == 0
    shown = capsys.readouterr().out
    directory = folder / "run"

    assert "held-out cross-entropy" in shown
    assert "What to type next" in shown
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

    # the file that it leaves serves what it trained
    serve = normalize(nodes.read(directory / "serve.yaml"), require_actions=True)
    assert serve.model is not None
    assert Path(str(serve.model.name_or_path), "config.json").is_file()


@pytest.mark.xdist_group("elarge-pipeline")
def test_running_it_again_trains_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = folder / "run" / "metrics.jsonl"
    if not metrics.exists():
        run(config(folder, actions=["train"]))
    before = metrics.read_text()
    assert run(config(folder, actions=["train"])) == 0
    shown = capsys.readouterr().out
    assert "the training was finished before (3 steps): nothing was left to train" in shown
    assert "training a tokenizer" not in shown.split("finished before")[0].splitlines()[-3:]
    assert metrics.read_text() == before


@pytest.mark.xdist_group("elarge-pipeline")
def test_adapters_from_the_file(folder: Path) -> None:
    """They alone learn; what is left serves, and what PEFT reads lies beside it."""
    settings = config(folder, lora={"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "mlp"]})
    settings["trainer"]["save_directory"] = str(folder / "adapted")
    settings["actions"] = ["train", {"generate": {"prompts": ["The "], "max_tokens": 3}}]
    assert run(settings) == 0
    left = folder / "adapted"
    said = json.loads((left / "adapter" / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"]) == (4, 8.0)
    assert sorted(said["target_modules"]) == ["down_proj", "gate_proj", "q_proj", "up_proj"]
    settings["model"] = {"name_or_path": str(left / "model")}
    settings["actions"] = settings["actions"][1:]
    assert run({**settings, "lora": {"name_or_path": str(left / "adapter")}}) == 0
    assert run({k: v for k, v in settings.items() if k != "lora"}) == 0


@pytest.mark.parametrize(
    ("changes", "where", "words"),
    [
        ({"lora": {"rank": 0}}, "lora.rank", "greater than or equal to 1"),
        ({"lora": {"targets": ["qproj"]}}, "lora.targets", "qproj"),
        ({"lora": {"rnk": 4}}, "lora.rnk", "did you mean 'rank'"),
    ],
)
def test_adapters_that_cannot_be(
    folder: Path, changes: dict[str, Any], where: str, words: str
) -> None:
    settings = config(folder, **changes)
    settings["trainer"]["save_directory"] = str(folder / "no")
    with pytest.raises(InputError) as error:
        run(settings)
    assert where in str(error.value)
    assert words in str(error.value)


BEFORE_TRAINING: list[tuple[dict[str, Any], str, str]] = [
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


@pytest.mark.parametrize(("changes", "where", "words"), BEFORE_TRAINING)
def test_what_would_fail_later_fails_before_training(
    folder: Path, changes: dict[str, Any], where: str, words: str
) -> None:
    settings = config(folder, **changes)
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
            run(config(folder, actions=["train", {"serve": {"port": port}}]))


def test_data_that_is_not_there_is_blamed_with_its_place(folder: Path) -> None:
    settings = config(folder, actions=["train"])
    settings["mixture"]["informs"] = [{"data_files": str(folder / "none.jsonl")}]
    with pytest.raises(InputError, match=r"run\.yaml:\d+:\d+: .*none\.jsonl"):
        run(settings)
    settings["mixture"]["informs"] = [
        {"data_files": str(folder / "texts.jsonl"), "content_field": "txt"}
    ]
    with pytest.raises(InputError, match="did you mean 'text'"):
        run(settings)
