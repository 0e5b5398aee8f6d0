"""A third-party package adds a family by an entry point and passes the conformance suite."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.workspace import ROOT

MODULE = """
from ed_infra.config import EasyDeLBaseConfig
from tests.guides.my_model import register

class ThirdConfig(EasyDeLBaseConfig):
    model_type = "third"

    def __init__(self, num_hidden_layers=1, intermediate_size=32, vocab_size=64, **kwargs):
        super().__init__(**kwargs)
        self.num_hidden_layers = num_hidden_layers
        self.intermediate_size = intermediate_size
        self.vocab_size = vocab_size

register(ThirdConfig, "third")
"""

PROGRAM = """
import sys
import numpy as np
from ed_infra import registry
from ed_models import AutoEasyDeLModelForCausalLM
assert "third" in registry.model_types() and "third_family" not in sys.modules
try:
    registry.get_config("thrid")
except registry.RegistryError as error:
    assert "did you mean 'third'" in str(error), error
config = registry.get_config("third")(hidden_size=16, num_attention_heads=2, rope_theta=1e4)
model = AutoEasyDeLModelForCausalLM.from_config(config)
assert type(model).__name__ == "MyModel" and model.model_type == "third"
output = model.generate(np.asarray([[3, 4]]), max_new_tokens=2, eos_token_id=[]).sequences
assert output.shape == (1, 4)
model.save_pretrained(sys.argv[1])

from ed_models.conformance import AGAINST_TORCH, CHECKS, Cases, subjects
# The configuration has no number of key heads.
(subject,) = subjects({"third": Cases({"guide": {"num_key_value_heads": None}})})
for name in CHECKS.keys() - AGAINST_TORCH.keys():
    CHECKS[name](subject)
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Create a directory with a module and the metadata of an installed package."""
    site = tmp_path / "site"
    metadata = site / "third_family-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: third-family\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[easydel.models]\nthird = third_family\n")
    (site / "third_family.py").write_text(MODULE)
    return site


@pytest.mark.nightly  # CI runs this test
def test_installed_package_adds_a_family(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(ROOT)]))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "saved")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "saved/config.json").read_text())["model_type"] == "third"
