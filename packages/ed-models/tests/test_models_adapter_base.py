"""A saved adapter names the base that it was trained on, so that it can be loaded with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from ed_models import AutoEasyDeLModelForCausalLM
from ed_models.checkpoints import saving
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a small Llama with a tokenizer."""
    from ed_data.tokens.bpe import train_bpe

    folder = tmp_path_factory.mktemp("base") / "model"
    tokenizer = train_bpe(["a text of a few words"], vocab_size=300)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    LlamaForCausalLM.create(config, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_adapted(source: str | Path, target: Path, **options: Any) -> dict[str, Any]:
    """Load a base, save an adapter of it, and return the settings of the adapter."""
    model: Any = AutoEasyDeLModelForCausalLM.from_pretrained(source, **options)
    model.apply_lora_to_layers(2, ".*q_proj.*").save_pretrained(target)
    return json.loads((target / "adapter_config.json").read_text())


def test_adapter_of_a_gguf_file_names_the_file_and_has_its_tokenizer(
    folder: Path, tmp_path: Path
) -> None:
    """The folder that stands for the file during a process is deleted at its end."""
    model: Any = AutoEasyDeLModelForCausalLM.from_pretrained(folder)
    file = model.save_gguf(tmp_path / "base.gguf", tokenizer=folder, dtype="q8_0")
    settings = save_adapted(file, tmp_path / "adapter")
    assert settings["base_model_name_or_path"] == str(file)
    assert (tmp_path / "adapter" / "tokenizer.json").is_file()
    assert "# LoRA adapter for base.gguf\n" in (tmp_path / "adapter" / "README.md").read_text()


@pytest.mark.parametrize("revision", [None, "second"])
def test_adapter_of_a_repository_names_it_and_its_revision(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: str | None
) -> None:
    cache = tmp_path / "hub"
    repository = cache / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    for commit, name in (("abc", "main"), ("def", "second")):
        shutil.copytree(folder, repository / "snapshots" / commit)
        (repository / "snapshots" / commit / "merges.txt").write_text(name)
        (repository / "refs" / name).write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    options = {"revision": revision, "local_files_only": True}
    settings = save_adapted("org/tiny", tmp_path / "adapter", **options)
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("org/tiny", revision)
    assert (tmp_path / "adapter" / "merges.txt").read_text() == (revision or "main")


def test_base_that_is_not_here_is_none(tmp_path: Path) -> None:
    for source in (None, "", "org/other", "a/b/c", str(tmp_path / "none"), "package:none/a.gguf"):
        assert saving.find_checkpoint(source) is None
