"""Tokenizers that a run trains."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ed_data import Inform, Mixture
from ed_data.schema import RELEVANCE, TEXT, Schema
from ed_elarge.building.tokenizer_training import kept_or_made, load_or_train
from ed_elarge.config.sections import TokenizerTraining
from transformers import PreTrainedTokenizerBase


@pytest.mark.parametrize(("schema", "chats"), [(TEXT, True), (RELEVANCE, False)])
def test_only_tokenizers_of_pairs_lack_a_chat_template(
    schema: Schema, chats: bool, tmp_path: Path
) -> None:
    """sentence-transformers applies a stored chat template to the texts of a cross-encoder."""
    row = {"content": "some words", "query": "some", "document": "words", "label": 1.0}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    mixture = Mixture(informs=[Inform(data_files=str(tmp_path / "rows.jsonl"))], cache_dir=tmp_path)
    made = load_or_train(TokenizerTraining(vocab_size=300), mixture, tmp_path / "made", schema)
    assert (made.chat_template is not None) == chats


def test_processes_that_train_the_same_tokenizer_at_the_same_time_keep_one(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"content": "some words"}))
    mixture = Mixture(informs=[Inform(data_files=str(tmp_path / "rows.jsonl"))], cache_dir=tmp_path)
    options, folder = TokenizerTraining(vocab_size=300), tmp_path / "made"
    count, loaded = 8, []
    together = threading.Barrier(count)

    def make() -> PreTrainedTokenizerBase:
        together.wait()  # no process has stored a tokenizer yet
        return tokenizer

    def process(_: int) -> object:
        return kept_or_made(options, mixture, folder, TEXT, make, loaded.append, {})

    tokenizer = load_or_train(options, mixture, tmp_path / "alone")
    for old in (False, True):
        shutil.rmtree(folder, ignore_errors=True)
        if old:  # of other options
            load_or_train(TokenizerTraining(vocab_size=280), mixture, folder)
        with ThreadPoolExecutor(count) as processes:
            assert [*processes.map(process, range(count))] == [tokenizer] * count
        assert not loaded, "a process loaded a tokenizer although none was stored"
        assert len(load_or_train(options, mixture, folder)) == len(tokenizer)
        assert not [*tmp_path.glob(".made.*")]
