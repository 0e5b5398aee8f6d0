"""The import of a family loads its body, its head and its configuration, and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Parts of ed-models and ed-layers that a family loads at their first use.
UNUSED = (
    *("ed_models.adapters", "ed_models.checkpoints", "ed_models.generation", "ed_models.auto"),
    *("ed_models.tasks.classification", "ed_models.tasks.embedding"),
    *("ed_layers.lora", "ed_layers.quantization", "ed_layers.moe", "ed_layers.recurrence"),
    *("ed_layers.cache.contiguous", "ed_layers.cache.hybrid", "ed_layers.cache.paged"),
    *("ed_layers.attention.dispatch", "ed_layers.attention.kernel"),
    "ed_layers.native.",
)

#: Upper limit of the number of modules. `__init__.py` files contain no code and do not count.
MOST = 60

PROGRAM = """
import sys
import ed_models.families.{family}
for name, module in list(sys.modules.items()):
    if name.startswith("ed_") and not module.__file__.endswith("__init__.py"):
        print(name)
"""


@pytest.mark.daily("llama")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_import_of_a_family_loads_at_most_60_modules(family: str) -> None:
    command = [sys.executable, "-c", PROGRAM.format(family=family)]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert not [name for name in loaded if name.startswith(UNUSED)]
    assert len(loaded) <= MOST, sorted(loaded)
