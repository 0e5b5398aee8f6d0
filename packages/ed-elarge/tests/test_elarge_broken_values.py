"""Broken values and misspelled keys are reported at their line, with a suggestion."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ed_elarge.config import nodes
from ed_elarge.config.layers import replace_value
from maximal_run_file import MAXIMAL, dry_run, written

#: Broken values of `MAXIMAL`: path of the key, value, words of the error or warning.
BROKEN: list[tuple[str, Any, str]] = [
    ("model", {"name_or_path": "nope/"}, "no such directory"),
    ("loader.param_dtype", "float", "write float32 or float64"),
    ("sharding.axis_dims", [3, 7, 1, 1, 1], "needs 21 devices"),
    ("sharding.axis_dims", [3, -1, 1, 1, 1], "needs a multiple of 3 devices"),
    ("base_config.values.sharding_rules", [["(", ["tp"]]], "is not a regular expression"),
    ("sharding.partition_rules", [["(", ["tp"]]], "is not a regular expression"),
    ("base_config.values.sharding_axis_names", [{"a": 1}, "b", "c"], "should be a valid string"),
    ("mixture.pack_eos_token_id", 300, "is not in the vocabulary of 300 tokens"),
    ("mixture.cache_dir", "", "is an empty text"),
    ("mixture.informs.0.name", "", "is an empty text"),
    (
        "mixture.informs.1",
        {"type": "json", "data_files": "s3://", "name": "texts"},
        "names no bucket",
    ),
    ("mixture.save.path", "gs:///", "names no bucket"),
    ("trainer.save_directory", " ", "save_directory is empty"),
    ("trainer.save_directory", "gs://bucket/run", "set mirror_address to the address"),
    ("trainer.mirror_address", "gs://", "names no bucket"),
    ("trainer.trainable_rules", ["lm_head"], "must be a list, got 'lm_head'"),
    ("trainer.run_name", "", "is an empty text"),
    ("esurge.page_size", 3, "use 2 or 4"),
    ("trainer.save_steps", None, "save_steps is not set: the run saves one checkpoint"),
    ("trainer.do_last_save", False, "the trained model is not saved: eval, generate, serve"),
    ("mixture.mixture_schedule", {"pionts": []}, "did you mean 'points'"),
    (
        "mixture.mixture_schedule",
        {"points": [{"stpe": 10, "weights": {"topics": 1, "texts": 0}}]},
        "unknown key 'stpe'; did you mean 'step'",
    ),
    (
        "mixture.mixture_schedule",
        {"points": [{"step": 10, "weights": {"topisc": 1, "texts": 0}}]},
        "there is no inform 'topisc'; did you mean 'topics'",
    ),
]


@pytest.mark.parametrize(("path", "value", "words"), BROKEN)
def test_broken_value_is_refused_or_warned_about(
    example_folder: Path, path: str, value: Any, words: str
) -> None:
    keys = tuple(int(part) if part.isdigit() else part for part in path.split("."))
    document = yaml.safe_load(MAXIMAL)
    if keys[:2] == ("base_config", "values") or keys[1:] == ("axis_dims",):
        document["sharding"].pop("axis_names", None)
        document["sharding"].pop("dcn_axis_dims", None)
    if keys[:2] == ("mixture", "mixture_schedule"):
        document["mixture"].pop("stop_strategy")
    text = written(replace_value(document, keys, value))
    _, answer = dry_run(text)
    places = re.findall(r"run\.yaml:(\d+):\d+: (.*)", answer)
    assert any(words in message for _, message in places), answer
    line = next(int(line) for line, message in places if words in message)
    span = nodes.parse_yaml(text).span(keys, on_key=True)
    owner = next((part for part in reversed(keys) if isinstance(part, str)), "")
    lines = text.splitlines()
    near = "\n".join(lines[max(0, line - 2) : line + 1])
    assert span is not None and (span.line <= line - 1 or owner in near), answer


@pytest.mark.nightly
@pytest.mark.parametrize("section", ["trainer", "mixture", "esurge", "eval", "loader"])
def test_typo_within_two_edits_suggests_the_key(example_folder: Path, section: str) -> None:
    document = yaml.safe_load(MAXIMAL)
    tried = 0
    for key in document[section]:
        if len(key) < 5:
            continue
        for typo in (key[:-1], key + "s", key[0] + key[2] + key[1] + key[3:], key[:2] + key[3:]):
            if typo == key or typo in document[section]:
                continue
            other = {typo if k == key else k: v for k, v in document[section].items()}
            code, answer = dry_run(written({**document, section: other}))
            tried += 1
            assert code == 2, (typo, answer)
            assert f"did you mean {key!r}" in answer, (typo, answer)
    assert tried > 10
