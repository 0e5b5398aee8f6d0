"""The tokenizer that is saved with a model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ed_infra.testing import english_topics
from ed_models.checkpoints import tokenizers as processor
from tokenizers import Tokenizer, models, trainers
from transformers import PreTrainedTokenizerFast


@pytest.mark.nightly
def test_saved_tokenizer_has_the_positions_of_the_model_and_cuts_no_text(
    tmp_path: Path, monkeypatch: Any
) -> None:
    backend = Tokenizer(models.BPE())
    trainer: Any = trainers.BpeTrainer(vocab_size=300, special_tokens=["<pad>"])
    backend.train_from_iterator(english_topics().values(), trainer)
    known: Any = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", model_max_length=1024
    )
    known("abc " * 200, truncation=True, max_length=64, padding="max_length")
    monkeypatch.setattr(processor, "longest_sequence", lambda config: 256)
    model: Any = SimpleNamespace(config=None)
    processor.with_length(known, model).save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    assert (stored["truncation"], stored["padding"]) == (None, None)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["model_max_length"] == 256
    assert known.model_max_length == 1024
