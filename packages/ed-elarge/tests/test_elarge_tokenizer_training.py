"""Tokenizers that a run trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ed_data import Inform, Mixture
from ed_data.schema import RELEVANCE, TEXT, Schema
from ed_elarge.building.tokenizer_training import load_or_train
from ed_elarge.config.sections import TokenizerTraining


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
