"""Two processes with two devices each load a model, generate, and save the model together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ed_infra.testing import run_processes
from safetensors.numpy import load_file

pytestmark = pytest.mark.nightly

PROCESS = """
import sys
import jax
import numpy as np
from ed_infra import distributed
assert distributed.initialize()
from ed_models import AutoEasyDeLModelForCausalLM
model = AutoEasyDeLModelForCausalLM.from_pretrained(
    sys.argv[1], sharding_axis_dims=(1, 2, 1, 2, 1)
)
kernel = model.lm_head.kernel.get_value()
assert not kernel.is_fully_addressable
assert sum(shard.data.size for shard in kernel.addressable_shards) == kernel.size // 2
out = model.generate(np.arange(1, 7)[None], max_new_tokens=8)
np.save(f"{sys.argv[2]}.{jax.process_index()}.npy", out.sequences)
model.save_pretrained(sys.argv[2], max_shard_size="8KB")
"""


def weights(directory: Path) -> dict[str, np.ndarray]:
    return {k: v for file in directory.glob("*.safetensors") for k, v in load_file(file).items()}


def test_two_processes_load_generate_and_save(tmp_path: Path) -> None:
    from ed_models.families.llama import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
        initializer_range=0.3,
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    model = LlamaForCausalLM.create(config, seed=0)
    model.save_pretrained(tmp_path / "one")
    want = model.generate(np.arange(1, 7)[None], max_new_tokens=8).sequences

    command = ["-c", PROCESS, tmp_path / "one", tmp_path / "two"]
    run_processes(command, tmp_path / "logs", processes=2, devices=2)
    for process in range(2):
        np.testing.assert_array_equal(np.load(tmp_path / f"two.{process}.npy"), want)
    first, second = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert first.keys() == second.keys()
    for name, value in first.items():
        np.testing.assert_array_equal(second[name], value)
