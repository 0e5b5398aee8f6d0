"""Llama through the SFT trainer: meshes, scanned and unrolled depth, and stored precision agree."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers import SFTArguments, SFTTrainer
from ed_trainers.figures.metrics import read_metrics


class Packed:
    """Rows that hold two segments and padding."""

    steps_per_epoch = 3

    def batch_at(self, step):
        random = np.random.default_rng(step)
        ids = random.integers(1, 64, (8, 16)).astype(np.int32)
        column = np.arange(16)
        cut, end = random.integers(3, 8, (8, 1)), random.integers(10, 17, (8, 1))
        segments = np.where(column < cut, 1, 2) * (column < end)
        return {
            "input_ids": np.where(segments > 0, ids, 0),
            "labels": np.where(segments > 0, ids, -100),
            "segment_ids": segments.astype(np.int32),
            "position_ids": np.where(column < cut, column, column - cut) * (segments > 0),
        }


def losses(directory, *, param_dtype=jnp.float32, config=None, **given):
    settings = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
        "sharding_axis_dims": (1, 1, 1, 1, 1),
        **(config or {}),
    }
    model = LlamaForCausalLM.create(LlamaConfig(**settings), param_dtype=param_dtype)
    arguments = SFTArguments(
        **{
            "save_directory": str(directory),
            "total_batch_size": 8,
            "max_training_steps": 3,
            "log_steps": 1,
            "learning_rate": 1e-2,
            "clip_grad": 1.0,
            "use_tensorboard": False,
            "do_last_save": False,
            **given,
        }
    )
    SFTTrainer(arguments, model=model, train_dataset=Packed(), eval_dataset=Packed()).train()
    rows = read_metrics(directory / "metrics.jsonl")
    return [row.get("loss", row.get("eval_loss")) for row in rows]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return losses(tmp_path_factory.mktemp("reference"))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "dims", [(1, 8, 1, 1, 1), (2, 2, 1, 2, 1), (4, 1, 1, 1, 2), (1, 2, 1, 2, 2)], ids=str
)
def test_every_mesh_learns_the_same(tmp_path, reference, dims):
    got = losses(tmp_path, config={"sharding_axis_dims": dims})
    np.testing.assert_allclose(got, reference, rtol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("config", "given"),
    [
        ({"scan_layers": False}, {}),
        ({}, {"gradient_accumulation_steps": 4}),
        ({"gradient_checkpointing": "nothing_saveable"}, {}),
        ({}, {"lmhead_chunksize": 8}),
    ],
    ids=["unrolled", "accumulated", "remat", "chunked"],
)
def test_execution_options_do_not_change_losses(tmp_path, reference, config, given):
    got = losses(tmp_path, config=config, **given)
    np.testing.assert_allclose(got, reference, rtol=1e-5)


@pytest.mark.nightly
def test_bfloat16_parameters_are_trained_through_masters(tmp_path, reference):
    got = losses(tmp_path, param_dtype=jnp.bfloat16)
    # The start is rounded to bfloat16, the updates are not lost.
    np.testing.assert_allclose(got, reference, rtol=2e-2)
    assert got[-1] < got[0]


@pytest.mark.nightly
def test_the_model_is_saved_in_hugging_face_layout(tmp_path):
    losses(tmp_path, do_last_save=True, max_training_steps=1)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert (tmp_path / "model" / "model.safetensors").exists()
