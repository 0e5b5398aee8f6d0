"""`model.resize_token_embeddings`: rows for the ids of a tokenizer with added tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ed_elarge.config.nodes import parse_yaml
from ed_elarge.config.normalize import normalize
from ed_elarge.errors import InputError
from ed_esurge.command.load import parse_model_arguments, served_engine
from ed_esurge.engine import eSurge
from ed_infra.errors import ConfigError
from ed_models.checkpoints import hub
from run_files import run, small, with_texts
from transformers import AutoTokenizer

CALL = "<|call|>"


@pytest.fixture
def folder(tmp_path: Path, quickstart_model: Path) -> Path:
    """Save texts with an added token, and the tokenizer with this token."""
    tokenizer = AutoTokenizer.from_pretrained(quickstart_model)
    tokenizer.add_special_tokens({"additional_special_tokens": [CALL]})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with_texts(tmp_path)
    file = tmp_path / "texts.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({"text": CALL + row["text"]}) + "\n" for row in rows))
    return tmp_path


def settings(folder: Path, base: Path, rows: Any, **sections: Any) -> dict[str, Any]:
    model = {
        "name_or_path": str(base),
        "tokenizer": str(folder / "tokenizer"),
        "resize_token_embeddings": rows,
    }
    actions = ["train", {"generate": {"prompts": [f"{CALL} The"], "max_tokens": 2}}]
    return small(folder, model=model, actions=actions, **sections)


def rows_of(model: Any) -> np.ndarray:
    return np.asarray(model.model.embed_tokens.embedding.get_value(), np.float32)


@pytest.mark.nightly
def test_added_tokens_are_trained_saved_and_served(folder: Path, quickstart_model: Path) -> None:
    count = len(AutoTokenizer.from_pretrained(quickstart_model))
    with pytest.raises(InputError, match=r"id 320.*320 rows.*resize_token_embeddings: true"):
        run(settings(folder, quickstart_model, False))
    assert run(settings(folder, quickstart_model, True)) == 0
    saved: Any = hub.from_pretrained(folder / "run" / "model")
    base: Any = hub.from_pretrained(quickstart_model)
    assert saved.config.vocab_size == count + 1
    mean = rows_of(base).mean(axis=0)
    assert 1e-4 < np.abs(rows_of(saved)[count] - mean).max() < 0.1, "the row is trained"
    flags = ["--tokenizer", str(folder / "tokenizer"), "--max-model-len", "32"]
    with pytest.raises(ConfigError, match=r"ids up to 320.*320 rows.*resize_token_embeddings"):
        served_engine(parse_model_arguments([str(quickstart_model), *flags]))
    engine = served_engine(parse_model_arguments([str(folder / "run" / "model"), *flags]))
    assert isinstance(engine, eSurge)
    assert engine.vocab_size == count + 1


@pytest.mark.nightly
@pytest.mark.parametrize("modules", [None, ["embed_tokens", "lm_head"]])
def test_adapters_and_their_merged_model_have_the_rows(
    folder: Path, quickstart_model: Path, modules: list[str] | None
) -> None:
    count = len(AutoTokenizer.from_pretrained(quickstart_model))
    lora = {"rank": 2, **({} if modules is None else {"modules_to_save": modules})}
    assert run(settings(folder, quickstart_model, count + 7, lora=lora)) == 0
    merged: Any = hub.from_pretrained(folder / "run" / "model")
    base: Any = hub.from_pretrained(quickstart_model)
    adapted = base.load_adapter(folder / "run" / "adapter").unwrap_lora_to_layers()
    assert merged.config.vocab_size == adapted.config.vocab_size == count + 7
    np.testing.assert_allclose(rows_of(adapted), rows_of(merged), atol=1e-6)
    changed = np.abs(rows_of(merged)[:count] - rows_of(base)).max() > 0
    assert changed == (modules is not None)


def test_rows_are_refused_for_a_new_model_and_for_other_values() -> None:
    text = "model: {config: {model_type: llama}, resize_token_embeddings: true}\n"
    with pytest.raises(InputError, match="set vocab_size in config"):
        normalize(parse_yaml(text, "run.yaml"))
    with pytest.raises(InputError, match="resize_token_embeddings"):
        normalize(parse_yaml(text.replace("true", "-1"), "run.yaml"))
