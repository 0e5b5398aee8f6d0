"""The engine and run files load the text half of a multimodal checkpoint by its path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from ed_elarge import eLargeModel
from ed_elarge.config import nodes
from ed_elarge.config.normalize import normalize
from ed_elarge.config.table import check_machine
from ed_elarge.errors import InputError
from ed_esurge import SamplingParams
from ed_esurge.command.load import create_engine, parse_model_arguments
from ed_esurge.testing import byte_tokenizer
from ed_infra import registry
from ed_infra.enums import TaskType
from ed_models.checkpoints.text_halves import MODEL_TYPES
from safetensors.numpy import load_file, save_file

#: A model type whose language model is loaded, and that no family loads as a whole.
WHOLE = next(name for name in sorted(MODEL_TYPES) if name not in registry.model_types())
PROMPT = [5, 17, 40, 3, 9, 30]


@pytest.fixture(scope="module")
def model() -> Any:
    config = registry.get_config("gemma3_text")(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
        max_position_embeddings=64,
        initializer_range=0.2,
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    return registry.get_module(TaskType.CAUSAL_LM, "gemma3_text").create(config, seed=0)


@pytest.fixture(scope="module")
def checkpoint(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as the language model of a multimodal checkpoint, with a tokenizer."""
    directory = tmp_path_factory.mktemp("multimodal")
    model.save_pretrained(directory, tokenizer=byte_tokenizer())
    path = directory / "model.safetensors"
    tensors = {f"language_model.{name}": value for name, value in load_file(path).items()}
    tower = {"vision_tower.post_layernorm.weight": np.ones(32, np.float32)}
    save_file({**tensors, **tower}, path)
    config = {
        "architectures": ["WholeForConditionalGeneration"],
        "model_type": WHOLE,
        "text_config": json.loads((directory / "config.json").read_text()),
        "vision_config": {"model_type": "siglip_vision_model"},
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.nightly
def test_engine_of_the_command_line_generates_the_tokens_of_the_text_half(
    model: Any, checkpoint: Path
) -> None:
    sizes = "--max-model-len 32 --page-size 8 --max-num-seqs 2 --no-compile-runner"
    engine = create_engine(parse_model_arguments([str(checkpoint), *sizes.split()]))
    assert engine.task == TaskType.CAUSAL_LM
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    (output,) = engine.generate([PROMPT], params)
    expected = model.generate(np.array([PROMPT]), max_new_tokens=6, eos_token_id=None)
    np.testing.assert_array_equal(output.outputs[0].token_ids, expected.sequences[0, len(PROMPT) :])


def run_file(checkpoint: Path, **values: object) -> str:
    return yaml.safe_dump(
        {
            "model": {"name_or_path": str(checkpoint)},
            "base_config": {"values": values},
            "actions": ["validate"],
        }
    )


@pytest.mark.nightly
def test_run_file_changes_fields_of_the_text_half(checkpoint: Path) -> None:
    text = run_file(checkpoint, sliding_window=4)
    check_machine(normalize(nodes.parse_yaml(text, "f"), require_actions=True))
    model: Any = eLargeModel(yaml.safe_load(text)).build_model()
    assert (model.config.model_type, model.config.sliding_window) == ("gemma3_text", 4)


def test_run_file_rejects_fields_that_the_text_half_lacks(checkpoint: Path) -> None:
    text = run_file(checkpoint, mm_tokens_per_image=4)
    with pytest.raises(InputError, match="unknown key 'mm_tokens_per_image'"):
        normalize(nodes.parse_yaml(text, "f"), require_actions=True)


def test_task_of_a_run_file_selects_the_fields_of_the_whole_model_or_of_its_text_half(
    checkpoint: Path, tmp_path: Path
) -> None:
    stored = json.loads((checkpoint / "config.json").read_text())
    whole = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps({**stored, **whole}))
    fields = {"mm_tokens_per_image": None, "sliding_window": "causal-lm"}
    for name, task in fields.items():
        text = yaml.safe_load(run_file(tmp_path, **{name: 4}))
        for chosen in fields.values():
            model = {**text["model"], **({"task": chosen} if chosen else {})}
            document = nodes.parse_yaml(yaml.safe_dump({**text, "model": model}), "f")
            if chosen == task:
                normalize(document, require_actions=True)
            else:
                with pytest.raises(InputError, match=f"unknown key '{name}'"):
                    normalize(document, require_actions=True)
