"""Scripts in the style of EasyDeL's README and tutorials run unchanged."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
import types
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tools import easydel_python

SCRIPTS = sorted((Path(__file__).parent / "easydel_scripts").glob("*.py"))
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a random model with a tokenizer and a chat template."""
    from ed_data.tokens.bpe import train_bpe
    from ed_models.families.llama import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("scripts") / "model"
    texts = [f"the number {i}? and an answer {i + 1}! user: assistant: no" for i in range(50)]
    tokenizer = train_bpe(texts, vocab_size=300)
    tokenizer.chat_template = TEMPLATE
    ids: Any = tokenizer
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=ids.eos_token_id,
        pad_token_id=ids.pad_token_id,
        bos_token_id=ids.bos_token_id,
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    LlamaForCausalLM.create(config, seed=0).save_pretrained(folder, tokenizer=tokenizer)
    return folder


@pytest.fixture
def script_folder(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with the model."""
    shutil.copytree(tiny_model, tmp_path / "model")
    monkeypatch.setenv("ED_DATA_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_scripts_compile_and_use_names_of_the_umbrella() -> None:
    import ast

    import easydel as ed

    assert len(SCRIPTS) == 20
    for script in SCRIPTS:
        nodes = ast.walk(ast.parse(script.read_text("utf-8")))
        names = [ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)]
        for name in (name for name in names if name.startswith("ed.") and name.count(".") == 1):
            assert hasattr(ed, name.removeprefix("ed.")), f"{script.name}: {name}"


def test_replaced_modules_do_not_remove_other_imports() -> None:
    """A module that a block imports is the same module in the next block."""
    import colorsys

    sys.modules.pop("colorsys")
    stand_in = types.ModuleType("librosa")
    with easydel_python.replace_modules({"librosa": stand_in, "json": stand_in}):
        import colorsys as imported

        assert sys.modules["librosa"] is sys.modules["json"] is stand_in
    assert sys.modules["colorsys"] is imported is not colorsys
    assert sys.modules["json"] is json
    assert sys.modules.get("librosa") is not stand_in


@pytest.mark.nightly
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script_in_the_style_of_easydel_runs(script: Path, script_folder: Path) -> None:
    if not metadata.entry_points(group="easydel.rows"):
        pytest.skip("the installed ed-elarge has no entry point easydel.rows: run uv sync")
    runpy.run_path(str(script), run_name="__main__")
