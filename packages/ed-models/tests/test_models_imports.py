"""The import of a family loads its body, its head and its configuration, and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Parts of ed-models and ed-layers that no family needs before their first use.
UNUSED = (
    *("ed_models.adapters", "ed_models.checkpoints", "ed_models.generation", "ed_models.auto"),
    *("ed_models.tasks.classification", "ed_models.tasks.embedding"),
    *("ed_layers.lora", "ed_layers.quantization.model", "ed_layers.moe", "ed_layers.recurrence"),
    *("ed_layers.cache.contiguous", "ed_layers.cache.hybrid", "ed_layers.cache.paged"),
    *("ed_layers.attention.kernels", "ed_layers.native.", "ed_layers.quantization.qarray"),
)
MOST = 85

PROGRAM = """
import sys
import ed_models.families.{family}
print("\\n".join(name for name in sys.modules if name.startswith("ed_")))
"""


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_family_imports_few_modules(family: str) -> None:
    command = [sys.executable, "-c", PROGRAM.format(family=family)]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    modules = [name for name in loaded if name.startswith("ed_")]
    unused = [name for name in modules if name.startswith(UNUSED)]
    assert not unused
    assert len(modules) <= MOST, sorted(modules)
