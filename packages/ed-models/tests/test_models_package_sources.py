"""Models and tokenizers are loaded from files of an installed package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ed_infra.errors import CheckpointError
from ed_infra.package_files import find_package_file
from ed_infra.testing import tiny_llama, write_package
from ed_models.checkpoints import hub
from ed_models.checkpoints.text_halves import find_config
from ed_models.conformance import ONE
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LlamaForCausalLM:
    """A model that is also in the package `tiny-weights`, as a folder and as a GGUF file."""
    fields = tiny_llama(num_hidden_layers=1)
    fields.pop("model_type")
    config = LlamaConfig(**fields, sharding_axis_dims=ONE)
    model = LlamaForCausalLM.create(config, seed=1, dtype="float32", param_dtype="float32")
    model.save_pretrained(tmp_path / "saved")
    files = {
        f"tiny_weights/model/{path.name}": path.read_bytes()
        for path in (tmp_path / "saved").iterdir()
    }
    write_package(tmp_path / "site", "tiny_weights", files)
    monkeypatch.syspath_prepend(tmp_path / "site")
    find_package_file.cache_clear()
    return model


def test_model_of_a_package_equals_the_saved_model(model: LlamaForCausalLM) -> None:
    loaded = hub.from_pretrained("package:tiny-weights/model", sharding_axis_dims=ONE)
    ids = np.arange(8)[None]
    assert np.array_equal(loaded(ids).logits, model(ids).logits)
    assert find_config("package:tiny-weights/model") is not None


def test_changed_weights_of_a_package_are_refused(model: LlamaForCausalLM, tmp_path: Path) -> None:
    path = tmp_path / "site/tiny_weights/model/model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="install the package again"):
        hub.resolve("package:tiny-weights/model")
    assert find_config("package:tiny-weights/model") is None
