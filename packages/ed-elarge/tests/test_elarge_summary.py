"""The summary of a run shows the metrics of the method, and no others."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml
from ed_elarge.actions import execution
from ed_elarge.actions.summary import Summary
from ed_elarge.config.nodes import parse_yaml
from ed_elarge.config.normalize import normalize
from ed_infra.chats import Chat, Prompt

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_the_summary_shows_the_progress_figures_of_the_method_and_the_perplexity() -> None:
    summary = Summary()
    summary.metrics = {
        "steps": 20.0,
        "train_reward": 0.75,
        "train_kl": 0.01,
        "train_loss": 0.0,
        "eval_loss": 0.0,
        "eval_reward": 0.5,
        "eval_kl": 0.02,
        "eval_perplexity": 3.0,
        "eval_clip_ratio/low_mean": 0.0,
        "eval_clip_ratio/region_mean": 0.0,
        "goodput": 0.9,
    }
    assert [row[:2] for row in summary._rows()] == [
        ("steps", "20"),
        ("training reward", "0.7500"),
        ("training kl", "0.0100"),
        ("training loss", "0.0000"),
        ("held-out reward", "0.5000"),
        ("held-out kl", "0.0200"),
        ("held-out loss", "0.0000"),
        ("held-out perplexity", "3.0000"),
    ]


def test_error_rates_of_transcripts_are_rows_of_the_summary() -> None:
    summary = Summary()
    summary.metrics = {"steps": 3.0, "train_loss": 1.0, "eval_wer": 0.125, "eval_cer": 0.0312}
    rows = {name: value for name, value, _ in summary._rows()}
    assert rows["held-out word error rate"] == "12.5%"
    assert rows["held-out character error rate"] == "3.1%"


CHAT = (
    {"role": "system", "content": "Answer with the user's word."},
    {"role": "user", "content": "It's green."},
)
PICTURE = ({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},)
LONG = ({"role": "user", "content": "word " * 1000},)


@pytest.mark.parametrize(
    ("evaluated", "trained", "expected"),
    [
        ([CHAT], LONG, CHAT),  # a question of the evaluation, which training did not see
        ([], CHAT, CHAT),
        (["The", PICTURE, LONG], CHAT, CHAT),
        ([], PICTURE, ({"role": "user", "content": "Hello"},)),
        ([], LONG, ({"role": "user", "content": "Hello"},)),
    ],
)
def test_suggested_request_asks_for_what_the_model_was_trained_on(
    tmp_path: Path, evaluated: list[Prompt], trained: Chat, expected: Chat
) -> None:
    summary = Summary()
    summary.directory, summary.question = tmp_path, trained
    for prompt in evaluated:
        summary.record_sample(prompt, "green")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    request = next(line for line in summary._places(tmp_path).splitlines() if "curl" in line)
    command = shlex.split(request.partition(":")[2])
    assert json.loads(command[-1])["messages"] == list(expected)


@pytest.mark.parametrize(
    ("option", "metrics", "expected"),
    [
        ({}, {}, True),
        ({}, {"eval_wer": 0.5}, False),
        ({"predict_with_generate": False}, {}, False),
    ],
)
def test_summary_of_a_speech_model_needs_error_rates(
    option: dict[str, bool], metrics: dict[str, float], expected: bool
) -> None:
    document = yaml.safe_load((EXAMPLES / "whisper.yaml").read_text())
    del document["trainer"]["predict_with_generate"], document["trainer"]["generation_max_length"]
    document["trainer"] |= option
    run = normalize(parse_yaml(yaml.safe_dump(document), "run.yaml"))
    assert execution._needs_error_rates(run, metrics) is expected


def test_summary_of_a_text_model_needs_no_error_rates() -> None:
    run = normalize(parse_yaml((EXAMPLES / "sft.yaml").read_text(), "run.yaml"))
    assert not execution._needs_error_rates(run, {})
