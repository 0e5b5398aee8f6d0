"""A frozen base keeps the dtype of its file, and computes as with a wider copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_elarge.building.dtypes import plan_param_dtype
from ed_elarge.model import eLargeModel
from ed_infra import registry
from ed_infra.enums import TaskType
from flax import nnx

FIELDS: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "sharding_axis_dims": (1, 1, 1, 1, 1),
}


def save_model(folder: Path, dtype: str) -> Path:
    config = registry.get_config("llama")(**FIELDS)
    module = registry.get_module(TaskType.CAUSAL_LM, "llama")
    module.create(config, seed=1, param_dtype=dtype).save_pretrained(folder)
    return folder


def build(folder: Path, **sections: Any) -> Any:
    mesh = {"sharding": {"axis_dims": [1, 1, 1, 1, 1]}}
    return eLargeModel({"model": {"name_or_path": str(folder)}, **mesh, **sections}).build_model()


def list_param_dtypes(model: Any) -> tuple[set[str], set[str]]:
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    adapters = {str(x.dtype) for path, x in flat if "lora_" in str(path[-1])}
    return adapters, {str(x.dtype) for path, x in flat if "lora_" not in str(path[-1])}


@pytest.mark.daily("float32")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_base_of_adapters_keeps_the_dtype_of_its_file(tmp_path: Path, dtype: str) -> None:
    folder = save_model(tmp_path, dtype)
    kept = build(folder, lora={"rank": 4})
    adapters, base = list_param_dtypes(kept)
    assert base == {dtype} and adapters <= {"float32"}
    wide = build(folder, lora={"rank": 4}, loader={"param_dtype": "float32"})
    assert list_param_dtypes(wide)[1] == {"float32"}
    ids = jnp.arange(16)[None]
    np.testing.assert_allclose(kept(ids).logits, wide(ids).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.daily("sections1")
@pytest.mark.parametrize("sections", [{}, {"lora": {"rank": 4, "modules_to_save": ["lm_head"]}}])
def test_trained_weights_are_float32(tmp_path: Path, sections: dict[str, Any]) -> None:
    model = build(save_model(tmp_path, "bfloat16"), **sections)
    assert list_param_dtypes(model)[1] == {"float32"}


def test_plan_counts_the_bytes_of_the_file(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "bfloat16")
    sections: dict[str, Any] = {"model": {"name_or_path": str(folder)}, "lora": {"rank": 4}}
    for loader, dtype in (({}, "bfloat16"), ({"param_dtype": "float32"}, "float32")):
        assert plan_param_dtype(eLargeModel({**sections, "loader": loader}).config) == dtype
    del sections["lora"]
    assert plan_param_dtype(eLargeModel(sections).config) == "float32"


def test_reference_keeps_the_dtype_of_its_file(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "bfloat16")
    sections: dict[str, Any] = {
        "model": {"name_or_path": str(folder)},
        "sharding": {"axis_dims": [1, 1, 1, 1, 1]},
        "reference_model": {"name_or_path": str(folder)},
    }
    for options, dtype in (({}, "bfloat16"), ({"sync_ref_model": True}, "float32")):
        trainer = {"trainer_type": "dpo", "total_batch_size": 8, **options}
        reference = eLargeModel({**sections, "trainer": trainer}).build_reference_model()
        assert {str(x.dtype) for x in jax.tree.leaves(nnx.state(reference, nnx.Param))} == {dtype}
