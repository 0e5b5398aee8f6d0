"""Adapters over NF4 weights train on sampled completions: ppo, gkd, xpo, nash_md."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from ed_infra.specs import EasyDeLQuantizationConfig, LoraSpec
from ed_infra.testing import tiny_llama
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers.figures.metrics import read_metrics
from ed_trainers.online.model_rollout import ModelRollout
from ed_trainers.roles.value_head import NAME, VALUE_HEAD_FILE
from ed_trainers.stored.arrays import flat_arrays
from flax import nnx
from online_runs import END, online

ONE = (1, 1, 1, 1, 1)
GIVEN = {
    "ppo": {"num_iterations": 1, "beta": 0.1},
    "gkd": {"rewards": (), "lmbda": 0.5, "seq_kd": True, "seed": 2},
    "xpo": {"alpha": 0.1},
    "nash_md": {"mixture_coef": 0.3},
}


def base(seed=0, dims=ONE, scan=True):
    fields = tiny_llama(
        num_hidden_layers=1, vocab_size=32, sharding_axis_dims=dims, scan_layers=scan
    )
    del fields["model_type"]
    config = LlamaConfig(**{**fields, "eos_token_id": END, "pad_token_id": 0})
    return LlamaForCausalLM.create(config, seed=seed)


def learner(dims=ONE, scan=True):
    codes = EasyDeLQuantizationConfig("nf4", group_size=32)
    return base(dims=dims, scan=scan).quantize(codes).apply_lora(LoraSpec(rank=2), seed=1)


def frozen_bytes(model):
    """What must not change: everything but adapters and a value head."""
    _, _, other = model.split_module()
    flat = flat_arrays(other)
    return {name: np.array(x) for name, x in flat.items() if not name.startswith(NAME)}


def trained(method, directory, model, rollout=None, **given):
    options = {"max_training_steps": 3, "learning_rate": 0.3, **GIVEN[method], **given}
    if method == "gkd":
        options["frozen"] = {"teacher": base(seed=5, dims=tuple(model.config.sharding_axis_dims))}
    run = online(method, model, directory, **options)
    if rollout is None:
        run.method.rollout = ModelRollout(lambda own: own, rows=8)
    output = run.train()
    rows = read_metrics(directory / "metrics.jsonl")
    return run, output, [row for row in rows if "loss" in row]


def checked(method, run, output, rows, before):
    assert len(rows) == 3 and all(np.isfinite(row["loss"]) for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows)
    after = frozen_bytes(run.model)
    assert before.keys() == after.keys()
    assert any(array.dtype == np.uint8 for array in after.values()), "there are codes"
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array, err_msg=name)
    names = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(output.state.graphstate)}
    assert names and all("lora" in name or name.startswith(NAME) for name in names)
    if method != "gkd":
        assert not run.method.frozen.leaves, "the base under the adapters is the reference"
        assert abs(rows[0]["objective/kl"]) < 1e-4 < abs(rows[-1]["objective/kl"])
    # Only the adapter and the value head are saved.
    directory = output.save_directory
    assert (directory / "adapter" / "adapter_model.safetensors").is_file()
    assert not list(directory.rglob("model.safetensors"))
    assert (directory / "adapter" / VALUE_HEAD_FILE).is_file() == (method == "ppo")


@pytest.mark.nightly
def test_ppo_trains_over_quantized_base(tmp_path):
    model = learner()
    before = frozen_bytes(model)
    checked("ppo", *trained("ppo", tmp_path, model, rollout="the toy's"), before)


@pytest.mark.nightly
@pytest.mark.parametrize("method", GIVEN)
def test_every_given_method_trains_over_quantized_base(tmp_path, method):
    model = learner()
    before = frozen_bytes(model)
    checked(method, *trained(method, tmp_path, model), before)


@pytest.mark.nightly
@pytest.mark.parametrize("method", GIVEN)
def test_meshes_and_storage_do_not_matter_over_codes(tmp_path, method):
    """The first generation and its step, from the same adapters."""

    def first(name, **where):
        _, output, rows = trained(method, tmp_path / name, learner(**where), max_training_steps=1)
        return rows[0], jax.tree.leaves(output.state.model.to_layout("leaves").split_module()[1])

    row, left = first("one")
    for name, where in {"unrolled": {"scan": False}, "mesh": {"dims": (1, 2, 1, 2, 1)}}.items():
        other, right = first(name, **where)
        assert other["loss"] == pytest.approx(row["loss"], abs=2e-5), name
        for a, b in zip(left, right, strict=True):
            np.testing.assert_allclose(a, b, atol=5e-5, err_msg=name)
