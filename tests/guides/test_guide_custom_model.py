"""The guide's custom model can be registered, sharded, trained, saved, loaded and sampled from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra import registry
from ed_models import AutoEasyDeLConfig, AutoEasyDeLModelForCausalLM
from ed_trainers import SFTArguments, SFTTrainer
from ed_trainers.figures.metrics import read_metrics
from jax.sharding import PartitionSpec

from tests.guides.my_model import register
from tests.snippets.pages import blocks

PAGE = Path(__file__).parent / "base_config.md"
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
}


class Rows:
    """A loader that returns the same rows at each step."""

    steps_per_epoch = 4

    def batch_at(self, step: int) -> dict[str, np.ndarray]:
        ids = np.random.default_rng(0).integers(3, 128, (8, 16)).astype(np.int32)
        places = np.broadcast_to(np.arange(16, dtype=np.int32), ids.shape)
        one = np.ones_like(ids)
        return {"input_ids": ids, "labels": ids, "segment_ids": one, "position_ids": places}


@pytest.fixture
def config_class(monkeypatch: pytest.MonkeyPatch) -> type:
    """Return `MyModelConfig` of the guide's first block with the rules of a later block."""
    monkeypatch.setattr(registry, "_configs", dict(registry._configs))
    monkeypatch.setattr(registry, "_modules", dict(registry._modules))
    found = list(blocks(PAGE))
    names: dict[str, Any] = {"PartitionSpec": PartitionSpec, "__name__": "my_package"}
    exec(found[0].body, names)
    first = names["MyModelConfig"]
    exec(next(b.body for b in found if "Embedding layers - shard" in b.body), names)
    first.get_partition_rules = names["MyModelConfig"].get_partition_rules
    return first


@pytest.mark.nightly
def test_custom_model_registers_shards_trains_and_generates(
    config_class: Any, tmp_path: Path
) -> None:
    register(config_class)
    config = AutoEasyDeLConfig.for_model("my_model", **SIZES, sharding_axis_dims=(1, 4, 1, 2, 1))
    assert type(config) is config_class
    model: Any = AutoEasyDeLModelForCausalLM.from_config(
        config, dtype=jnp.float32, param_dtype=jnp.float32
    )
    layers = model.model.layers.run_0_2_1[0]
    # The partition rules of the guide apply exactly.
    down = layers.mlp.down_proj.kernel.get_value()
    assert down.sharding.spec == PartitionSpec(None, "tp", "fsdp")
    assert layers.norm.weight.get_value().sharding.spec == PartitionSpec()

    arguments = SFTArguments(
        save_directory=str(tmp_path / "run"),
        total_batch_size=8,
        max_training_steps=4,
        log_steps=1,
        learning_rate=1e-2,
        use_tensorboard=False,
    )
    SFTTrainer(arguments, model=model, train_dataset=Rows()).train()
    losses = [row["loss"] for row in read_metrics(tmp_path / "run/metrics.jsonl")]
    assert len(losses) == 4 and losses[-1] < losses[0]

    prompt = np.arange(3, 9)[None]
    output = model.generate(prompt, max_new_tokens=4, eos_token_id=[]).sequences
    assert output.shape == (1, 10)
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoEasyDeLModelForCausalLM.from_pretrained(
        tmp_path / "saved", sharding_axis_dims=(1, 1, 1, 1, 1)
    )
    assert type(loaded.config) is config_class and loaded.config.hidden_size == 32
    again = loaded.generate(prompt, max_new_tokens=4, eos_token_id=[]).sequences
    np.testing.assert_array_equal(again, output)
