"""Adds the folder of the tests to the import path, and saves a tiny model."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def quickstart_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a random two-layer Llama and a trained tokenizer in Hugging Face layout."""
    from ed_data.tokens.bpe import train_bpe
    from ed_infra.testing import english_topics, tiny_llama
    from ed_models.families.llama import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny") / "model"
    tokenizer = train_bpe(english_topics().values(), vocab_size=320)
    fields = tiny_llama(vocab_size=len(tokenizer), num_hidden_layers=2)
    del fields["model_type"]
    config = LlamaConfig(**fields, sharding_axis_dims=(1, 1, 1, 1, 1))
    LlamaForCausalLM.create(config, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def example_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with the data of the examples, and the models that they train."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.jsonl").write_text('{"text": "some text"}\n')
    (tmp_path / "texts.txt").write_text("some text\n")
    shutil.copytree(Path(__file__).parents[3] / "examples" / "data", tmp_path / "examples" / "data")
    for name in ("quickstart", "pretrain"):
        model = tmp_path / "runs" / name / "model"
        model.mkdir(parents=True)
        (model / "config.json").write_text('{"model_type": "llama"}')
        (model / "tokenizer.json").write_text("{}")
    return tmp_path
