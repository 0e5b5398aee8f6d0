"""Adapters alone learn: the same on every mesh and in every storage, over a base that stays."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from ed_infra.specs import LoraSpec
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers import arguments_class, trainer_class
from ed_trainers.figures.metrics import read_metrics
from flax import nnx
from method_runs import Pairs


class Packed:
    """Rows that hold two segments and padding."""

    steps_per_epoch = 4

    def batch_at(self, step):
        random = np.random.default_rng(step)
        ids = random.integers(1, 16, (8, 16)).astype(np.int32)
        segments = np.where(np.arange(16) < 7, 1, 2) * (np.arange(16) < 14)
        segments = np.broadcast_to(segments, ids.shape).astype(np.int32)
        return {
            "input_ids": np.where(segments > 0, ids, 0),
            "labels": np.where(segments > 0, ids, -100),
            "segment_ids": segments,
            "position_ids": np.where(segments == 2, np.arange(16) - 7, np.arange(16)),
        }


SPEC = LoraSpec(rank=3, alpha=6.0)


def trained(
    directory, *, spec=SPEC, config=None, quantized=None, method="sft", data=Packed, **given
):
    """Losses, the model before, and the state after."""
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
    before = LlamaForCausalLM.create(LlamaConfig(**settings))
    before = (before.quantize(quantized) if quantized else before).apply_lora(spec)
    arguments = arguments_class(method)(
        **{
            "save_directory": str(directory),
            "total_batch_size": 8,
            "max_training_steps": 4,
            "log_steps": 1,
            "learning_rate": 3e-2,
            "use_tensorboard": False,
            "do_last_save": False,
            **given,
        }
    )
    trainer = trainer_class(method)(arguments, model=before, train_dataset=data())
    after = trainer.train().state
    rows = read_metrics(directory / "metrics.jsonl")
    return [row["loss"] for row in rows if "loss" in row], before, after


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("reference"))


def test_lora_training_updates_only_adapters(reference):
    losses, before, state = reference
    assert losses[-1] < losses[0]
    names = {str(path[-1]) for path, _ in nnx.to_flat_state(state.graphstate)}
    assert names == {"lora_a", "lora_b"}
    # The moments of the optimizer are those of the adapters: a few numbers.
    adapters = sum(leaf.size for leaf in jax.tree.leaves(state.graphstate))
    moments = sum(leaf.size for leaf in jax.tree.leaves(state.opt_state))
    assert moments < 2.1 * adapters
    for old, new in zip(
        jax.tree.leaves(before.split_module()[2]), jax.tree.leaves(state.graphother), strict=True
    ):
        np.testing.assert_array_equal(old, new)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "config",
    [
        {"sharding_axis_dims": (1, 8, 1, 1, 1)},
        {"sharding_axis_dims": (2, 2, 1, 2, 1)},
        {"scan_layers": False},
    ],
    ids=str,
)
def test_meshes_and_storage_do_not_matter(tmp_path, reference, config):
    np.testing.assert_allclose(trained(tmp_path, config=config)[0], reference[0], rtol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "spec",
    [LoraSpec(rank=2, dora=True), LoraSpec(rank=2, dropout=0.2), LoraSpec(targets="embed|q_proj")],
    ids=["dora", "dropout", "embedding"],
)
def test_dora_dropout_and_embedding_adapters_reduce_loss(tmp_path, spec):
    losses, _, _ = trained(tmp_path, spec=spec)
    assert losses[-1] < losses[0]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"config": {"sharding_axis_dims": (2, 2, 1, 2, 1)}},
        {"method": "dpo", "data": Pairs, "config": {"max_position_embeddings": 24}},
    ],
    ids=["one device", "mesh", "dpo"],
)
def test_lora_training_keeps_quantized_base_unchanged(tmp_path, given):
    """The codes do not change by a bit, and only the adapter is saved."""
    losses, before, state = trained(
        tmp_path, quantized={"dtype": "nf4", "group_size": 16}, do_last_save=True, **given
    )
    assert losses[-1] < losses[0]
    old, new = jax.tree.leaves(before.split_module()[2]), jax.tree.leaves(state.graphother)
    assert any(leaf.dtype == np.uint8 for leaf in new)
    for x, y in zip(old, new, strict=True):
        np.testing.assert_array_equal(x, y)
    (folder,) = tmp_path.rglob("adapter_model.safetensors")
    assert folder.parent.name == "adapter"
    assert not list(tmp_path.rglob("model.safetensors"))
