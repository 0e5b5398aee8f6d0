"""The predicted memory of train steps equals that of compiled steps on simulated meshes."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from ed_elarge.config.normalize import normalize
from ed_elarge.errors import Document
from ed_elarge.plan import settings, shapes, training
from ed_elarge.plan.buffers import CPU
from ed_elarge.plan.mesh import mesh_of

Case = dict[str, Any]

#: The model of a case without changes; a case changes these values.
BASE: Case = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
    "length": 512,
    "rows": 16,
    "mesh": [1, 8, 1, 1, 1],
    "remat": "nothing_saveable",
    "optimizer": "adamw",
    "accumulation": 1,
    "chunk": None,
    "lora": None,
}
SMALL_HEAD = {"vocab_size": 1024, "length": 1024}
CASES: dict[str, Case] = {
    "base": {},
    "1024 tokens": {"length": 1024},
    "2048 tokens": {"length": 2048},
    "32 rows": {"rows": 32},
    "12 layers": {"num_hidden_layers": 12},
    "2 layers": {"num_hidden_layers": 2},
    "small head": SMALL_HEAD,
    "small head, 512 tokens": {"vocab_size": 1024},
    "small head, 2048 tokens": {"vocab_size": 1024, "length": 2048},
    "32000 words": {"vocab_size": 32000},
    "64000 words": {"vocab_size": 64000},
    "chunks of 256": {"vocab_size": 32000, "chunk": 256},
    "chunks of 512": {"vocab_size": 32000, "chunk": 512},
    "wide feed-forward": {**SMALL_HEAD, "intermediate_size": 2816},
    "16 heads": {**SMALL_HEAD, "num_attention_heads": 16, "num_key_value_heads": 16},
    "8 key heads": {**SMALL_HEAD, "num_key_value_heads": 8},
    "1024 features": {**SMALL_HEAD, "hidden_size": 1024},
    "1024 features, 32000 words": {"hidden_size": 1024, "vocab_size": 32000},
    "all kept": {"remat": ""},
    "all kept, 1024 tokens": {"remat": "", "length": 1024},
    "all kept, small head": {**SMALL_HEAD, "remat": ""},
    "all kept, wide": {**SMALL_HEAD, "remat": "", "intermediate_size": 2816},
    "all kept, 12 layers": {**SMALL_HEAD, "remat": "", "num_hidden_layers": 12},
    "all kept, 8 key heads": {**SMALL_HEAD, "remat": "", "num_key_value_heads": 8},
    "dots": {**SMALL_HEAD, "remat": "dots_saveable"},
    "dots, 12 layers": {**SMALL_HEAD, "remat": "dots_saveable", "num_hidden_layers": 12},
    "dots without batch": {**SMALL_HEAD, "remat": "dots_with_no_batch_dims_saveable"},
    "tp 2": {"mesh": [1, 4, 1, 2, 1]},
    "tp 2, small head": {**SMALL_HEAD, "mesh": [1, 4, 1, 2, 1]},
    "tp 4": {"mesh": [1, 2, 1, 4, 1]},
    "dp 8": {"mesh": [8, 1, 1, 1, 1]},
    "dp 8, small head": {**SMALL_HEAD, "mesh": [8, 1, 1, 1, 1]},
    "dp 2": {"mesh": [2, 4, 1, 1, 1]},
    "sp 2": {"mesh": [1, 4, 1, 1, 2]},
    "sp 2, small head": {**SMALL_HEAD, "mesh": [1, 4, 1, 1, 2]},
    "one device": {"mesh": [1, 1, 1, 1, 1], "rows": 4},
    "two microbatches": {"accumulation": 2},
    "two microbatches, small head": {**SMALL_HEAD, "accumulation": 2},
    "lion": {"optimizer": "lion"},
    "sgd": {"optimizer": "sgd"},
    "qwen3": {"model_type": "qwen3"},
    "adapters": {**SMALL_HEAD, "lora": 8},
    "adapters, all kept": {**SMALL_HEAD, "lora": 8, "remat": ""},
    "experts": {"model_type": "mixtral", "num_local_experts": 8, "vocab_size": 1024},
    "16 experts": {"model_type": "mixtral", "num_local_experts": 16, "vocab_size": 1024},
}


def run_of(case: Case) -> Any:
    """Return the run of a case."""
    own = {**BASE, **case}
    names = ("length", "rows", "mesh", "remat", "optimizer", "accumulation", "chunk", "lora")
    config = {key: value for key, value in own.items() if key not in names}
    trainer = {
        "trainer_type": "sft",
        "total_batch_size": own["rows"],
        "max_training_steps": 2,
        "optimizer": own["optimizer"],
        "gradient_accumulation_steps": own["accumulation"],
    }
    values = {
        "model": {
            "config": {**config, "max_position_embeddings": 4096, "tie_word_embeddings": False},
            "tokenizer": "tokenizer",
        },
        "sharding": {"axis_dims": own["mesh"]},
        "base_config": {"values": {"gradient_checkpointing": own["remat"]}},
        "mixture": {
            "informs": [{"type": "json", "data_files": "rows.jsonl"}],
            "pack_tokens": True,
            "pack_seq_length": own["length"],
        },
        "trainer": trainer,
        "actions": ["train"],
    }
    if own["chunk"] is not None:
        trainer["lmhead_chunksize"] = own["chunk"]
    if own["lora"] is not None:
        values["lora"] = {"rank": own["lora"]}
    return normalize(Document("plan.yaml", value=values))


def errors(case: Case) -> tuple[float, float]:
    """Return the relative errors of the arguments, and of arguments and temporary buffers."""
    from ed_elarge.plan.answers import train

    run = run_of(case)
    own, devices = settings.training(run), 8
    step = training.step(own, shapes.of_run(run), mesh_of(run, devices), CPU)
    found = train(run, {"vocab": None, "length": own.length})
    total = found["arguments"] + found["temporary"]
    return (
        step.arguments / found["arguments"] - 1,
        (step.arguments + step.temporary) / total - 1,
    )


def test_compiled_step_has_the_predicted_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ED_LAYERS_NATIVE", "0")
    of_arguments, of_all = errors(CASES["tp 2, small head"])
    assert abs(of_arguments) < 0.001
    assert abs(of_all) < 0.02


@pytest.mark.nightly
def test_memory_of_forty_meshes_and_models_is_predicted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ED_LAYERS_NATIVE", "0")
    assert len(CASES) >= 40
    found = {name: errors(case) for name, case in CASES.items()}
    for name, (of_arguments, of_all) in found.items():
        print(f"{name:<32}{of_arguments:+.4%} {of_all:+.2%}")
        assert abs(of_arguments) < 0.001, name
        assert abs(of_all) < 0.05, name
    assert statistics.median(abs(of_all) for _, of_all in found.values()) < 0.02
