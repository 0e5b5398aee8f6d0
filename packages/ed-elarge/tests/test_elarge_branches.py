"""The keys that a branch may change, and the samples that it scores again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ed_elarge.config import nodes
from ed_elarge.config.normalize import normalize
from ed_elarge.reruns.branching import compare_values, find_problem
from ed_elarge.reruns.finished_run import FinishedRun, claim_directory
from ed_elarge.reruns.stored_samples import list_samples
from ed_infra.errors import ConfigError
from run_files import with_changes


def normalize_changed(**changes: Any) -> Any:
    values = with_changes(trainer__max_training_steps=4, **changes)
    return normalize(nodes.parse_yaml(json.dumps(values), "run.yaml"))


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({"trainer__learning_rate": 1e-3}, True),
        ({"trainer__weight_decay": 0.5, "trainer__scheduler": "cosine"}, True),
        ({"trainer__clip_grad": 1.0, "trainer__evaluation_steps": 2}, True),
        ({"mixture__prefetch_workers": 0}, True),
        ({"trainer__seed": 3}, False),
        ({"trainer__total_batch_size": 4}, False),
        ({"trainer__optimizer": "lion"}, False),
        ({"trainer__ema_decay": 0.9}, False),
        ({"trainer__frozen_parameters": "embed"}, False),
        ({"mixture__eval_fraction": 0.2}, False),
        ({"mixture__pack_seq_length": 32}, False),
        ({"lora": {"rank": 2}}, False),
        ({"model__config__hidden_size": 32}, False),
        ({"loader": {"param_dtype": "bf16"}}, False),
    ],
)
def test_only_keys_without_effect_on_the_past_may_change(
    changes: dict[str, Any], allowed: bool
) -> None:
    keys = compare_values(normalize_changed(), normalize_changed(**changes))
    assert keys
    assert all(find_problem(key) is None for key in keys) is allowed


def test_samples_of_previews_rollouts_and_evaluations_are_read(tmp_path: Path) -> None:
    preview = {"step": 2, "samples": [{"prompt": "a", "completion": "b"}], "time": 1.0}
    rollout = {"step": 3, "prompt": "c", "completion": "d", "reward": 0.5, "generation": 0}
    answer = {"prompt": [{"role": "user", "content": "e"}], "completion": "f"}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(preview) + "\n")
    (tmp_path / "completions.jsonl").write_text(json.dumps(rollout) + "\n")
    (tmp_path / "summary.json").write_text(json.dumps({"samples": [answer]}))
    samples = [sample.to_dict() for sample in list_samples(tmp_path)]
    assert samples == [
        {"prompt": "a", "completion": "b", "step": 2},
        {"prompt": "c", "completion": "d", "step": 3, "reward": 0.5},
        answer,
    ]


def test_directory_of_another_run_and_a_run_without_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="of a finished run"):
        FinishedRun.read(tmp_path)
    assert not claim_directory(tmp_path / "new", "record.json", {"step": 3})
    (tmp_path / "record.json").write_text('{"step": 3}')
    assert claim_directory(tmp_path, "record.json", {"step": 3})
    with pytest.raises(ConfigError, match="choose another --output"):
        claim_directory(tmp_path, "record.json", {"step": 4})
