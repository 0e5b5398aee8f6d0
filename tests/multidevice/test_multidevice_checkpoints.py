"""Two processes, each with two devices, load one model, run it, and save it again together."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

pytestmark = pytest.mark.nightly

PROCESS = """
import sys
import jax
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
import numpy as np
from ed_models import AutoEasyDeLModelForCausalLM
model = AutoEasyDeLModelForCausalLM.from_pretrained(
    sys.argv[3], sharding_axis_dims=(1, 2, 1, 2, 1)
)
kernel = model.lm_head.kernel.get_value()
assert not kernel.is_fully_addressable
assert sum(shard.data.size for shard in kernel.addressable_shards) == kernel.size // 2
out = model.generate(np.arange(1, 7)[None], max_new_tokens=8)
np.save(f"{sys.argv[4]}.{sys.argv[2]}.npy", out.sequences)
model.save_pretrained(sys.argv[4], max_shard_size="8KB")
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

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    arguments = [tmp_path / "one", tmp_path / "two"]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, address, str(process), *map(str, arguments)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(outputs)
    for process in range(2):
        np.testing.assert_array_equal(np.load(tmp_path / f"two.{process}.npy"), want)
    first, second = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert first.keys() == second.keys()
    for name, value in first.items():
        np.testing.assert_array_equal(second[name], value)
