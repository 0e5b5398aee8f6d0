"""Recurrent families: the names of their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import transformers
from ed_infra.enums import TaskType
from ed_infra.errors import CheckpointError
from ed_infra.registry import get_config, get_module
from ed_models.checkpoints import hub
from ed_models.conformance import ONE, forward
from ed_models.families import kimi_linear, olmo_hybrid  # noqa: F401  (registers them)
from flax import nnx
from safetensors.numpy import load_file, save_file

from tests.conformance import cases


def tiny(model_type: str) -> Any:
    """A model of the family's first conformance row."""
    cls = get_module(TaskType.CAUSAL_LM, model_type)
    row = next(iter(cases.cases(model_type)[model_type].rows))
    fields = {**cases.fields(model_type, row), "sharding_axis_dims": ONE}
    return cls.create(get_config(model_type)(**fields), seed=0)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model_type", "written", "published"),
    [
        ("kimi_linear", "layers.0.block_sparse_moe.up_proj", "layers.0.mlp.up_proj"),
        (
            "olmo_hybrid",
            "layers.1.feedforward_layer_norm",
            "layers.1.post_attention_layernorm",
        ),
    ],
)
def test_published_and_transformers_tensor_names_are_both_read(
    model_type: str, written: str, published: str, tmp_path: Path
) -> None:
    """transformers writes names that the authors' files have not; both are read."""
    model = tiny(model_type)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert f"model.{written}.weight" in tensors
    tensors[f"model.{published}.weight"] = tensors.pop(f"model.{written}.weight")
    save_file(tensors, file, metadata={"format": "np"})
    again = hub.from_pretrained(tmp_path, type(model), sharding_axis_dims=ONE)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(model))
    # A tensor under both names is one too many.
    tensors[f"model.{written}.weight"] = tensors[f"model.{published}.weight"]
    save_file(tensors, file, metadata={"format": "np"})
    with pytest.raises(CheckpointError, match=published):
        hub.from_pretrained(tmp_path, type(model), sharding_axis_dims=ONE)


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.parametrize("row", [0, 1])
def test_olmo_hybrid_checkpoints_that_transformers_writes_are_loaded(
    row: int, tmp_path: Path
) -> None:
    """transformers cuts the joined convolution into three equal parts, whatever the widths are."""
    torch = pytest.importorskip("torch")
    name = [*cases.cases("olmo_hybrid")["olmo_hybrid"].rows][row]
    fields = {**cases.fields("olmo_hybrid", name), "linear_value_head_dim": 10}
    torch.manual_seed(0)
    theirs = transformers.OlmoHybridForCausalLM(transformers.OlmoHybridConfig(**fields)).eval()
    theirs.save_pretrained(tmp_path)
    cls = get_module(TaskType.CAUSAL_LM, "olmo_hybrid")
    ours: Any = hub.from_pretrained(tmp_path, cls, sharding_axis_dims=ONE)
    ids = np.arange(24).reshape(2, 12)
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(forward(ours, input_ids=ids).logits, expected, atol=2e-4)
