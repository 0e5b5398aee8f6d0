"""Quantization-aware training: rounded products, gradients straight through, unrounded weights."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_infra.specs import LoraSpec
from ed_infra.testing import tiny_llama
from ed_layers.quantization.model import QuantParam, quantize, simulate_in_place
from ed_layers.quantization.simulated import Simulated
from ed_models.auto import AutoEasyDeLModelForCausalLM
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers import EasyDeLState, SFTArguments, SFTTrainer
from ed_trainers.stored.arrays import flat_arrays
from flax import nnx
from pydantic import ValidationError
from test_trainers_loop import StopAt, exact

AFFINE = {"quantization_mode": "affine", "quantization_bits": 4, "quantization_group_size": 16}
MODES = [AFFINE, {"quantization_mode": "nf4"}, {"quantization_mode": "mxfp8"}]


@pytest.mark.parametrize(
    ("given", "form"),
    [
        (AFFINE, ("int4", 16)),
        ({**AFFINE, "quantization_bits": 8}, ("int8", 16)),
        ({"quantization_mode": "affine"}, ("int4", None)),
        ({"quantization_mode": "nf4", "quantization_bits": 4}, ("nf4", None)),
        ({"quantization_mode": "mxfp4", "quantization_block": 32}, ("mxfp4", 32)),
    ],
)
def test_mode_bits_and_group_size_are_a_format(given, form):
    spec = SFTArguments(**given).simulated_format
    assert spec is not None and spec.simulate and (spec.dtype, spec.group_size) == form
    assert SFTArguments().simulated_format is None


@pytest.mark.parametrize(
    ("given", "key", "words"),
    [
        ({"quantization_mode": "nvfp4"}, "quantization_mode", "use mxfp4"),
        ({"quantization_mode": "nf5"}, "quantization_mode", "did you mean 'nf4'"),
        ({"quantization_mode": "gguf"}, "quantization_mode", "unknown"),
        ({**AFFINE, "quantization_bits": 3}, "quantization_bits", "affine has 4 or 8 bits, not 3"),
        ({"quantization_mode": "nf4", "quantization_bits": 8}, "quantization_bits", "4 bits"),
        ({"quantization_bits": 4}, "quantization_bits", "without quantization_mode"),
        ({"quantization_group_size": 4}, "quantization_group_size", "without quantization_mode"),
        (
            {"quantization_mode": "mxfp4", "quantization_group_size": 16},
            "quantization_group_size",
            "groups of 32",
        ),
    ],
)
def test_a_format_that_does_not_exist_is_an_error_at_its_key(given, key, words):
    with pytest.raises(ValidationError) as caught:
        SFTArguments(**given)
    problem = caught.value.errors()[0]
    assert problem["loc"] == (key,) and words in problem["msg"]


def learner(scan=True, **fields):
    values = tiny_llama(
        num_hidden_layers=2,
        vocab_size=32,
        sharding_axis_dims=(1, 1, 1, 1, 1),
        scan_layers=scan,
        **fields,
    )
    del values["model_type"]
    return LlamaForCausalLM.create(LlamaConfig(**values), seed=0)


class Packed:
    """Rows of two documents of random tokens."""

    steps_per_epoch, fingerprint = 50, "packed"

    def batch_at(self, step):
        ids = np.random.default_rng(step).integers(1, 32, (4, 12)).astype(np.int32)
        segments = np.repeat([[1, 2]], 6, axis=1).repeat(4, axis=0).astype(np.int32)
        positions = np.tile(np.arange(6), (4, 2)).astype(np.int32)
        return {
            "input_ids": ids,
            "labels": ids,
            "segment_ids": segments,
            "position_ids": positions,
        }


def trainer(model, directory, *, callbacks=(), **given):
    options = {
        "total_batch_size": 4,
        "max_training_steps": 3,
        "learning_rate": 0.1,
        "optimizer": "sgd",
        "weight_decay": 0.0,
        "log_steps": 1,
        "use_tensorboard": False,
        "save_directory": str(directory),
    }
    return SFTTrainer(SFTArguments(**{**options, **given}), model, Packed(), callbacks=callbacks)


def simulated_values(model):
    """Return name -> values that products read, for each rounded matrix."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    values = {path: variable.get_value() for path, variable in flat}
    return {p: np.asarray(w.dense()) for p, w in values.items() if isinstance(w, Simulated)}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("given", "scan"), [(AFFINE, False), *((given, True) for given in MODES)], ids=str
)
def test_gradients_are_those_of_the_rounded_model_and_move_the_unrounded(tmp_path, given, scan):
    start = flat_arrays(nnx.state(learner(scan), nnx.Param))
    start = {name: np.array(x) for name, x in start.items()}
    aware = learner(scan)
    output = trainer(aware, tmp_path / "aware", max_training_steps=1, **given).train()
    moved = flat_arrays(nnx.state(aware, nnx.Param))
    # The reference: a plain model whose weights are the rounded ones.
    spec = SFTArguments(**given).simulated_format
    rounded = quantize(learner(scan), {"dtype": spec.dtype, "group_size": spec.group_size})
    plain = learner(scan)
    for path, variable in nnx.to_flat_state(nnx.state(rounded, QuantParam)):
        dense = variable.get_value().dense()
        nnx.update(plain, nnx.from_flat_state([(path, nnx.Param(dense))]))
    before = {n: np.array(x) for n, x in flat_arrays(nnx.state(plain, nnx.Param)).items()}
    reference = trainer(plain, tmp_path / "plain", max_training_steps=1).train()
    after = flat_arrays(nnx.state(plain, nnx.Param))
    assert output.metrics["train_loss"] == pytest.approx(reference.metrics["train_loss"], abs=2e-6)
    changed = 0
    assert moved.keys() == start.keys() == after.keys()
    for name, array in moved.items():
        step = np.asarray(array) - start[name]
        expected = np.asarray(after[name]) - before[name]
        np.testing.assert_allclose(step, expected, atol=3e-7, err_msg=name)
        changed += bool(np.any(before[name] != start[name]))
    assert changed >= (7 if scan else 14), "the matrices were rounded"


@pytest.mark.nightly
@pytest.mark.parametrize("given", MODES, ids=lambda given: given["quantization_mode"])
def test_quantizing_the_saved_model_gives_the_values_of_training(tmp_path, given):
    model = learner()
    run = trainer(model, tmp_path, **given)
    run.train()
    seen = simulated_values(model)
    assert len(seen) == 7
    saved = AutoEasyDeLModelForCausalLM.from_pretrained(
        tmp_path / "model",
        dtype="float32",
        param_dtype="float32",
        sharding_axis_dims=(1, 1, 1, 1, 1),
        config_kwargs={"scan_layers": True},
    )
    floats = flat_arrays(nnx.state(saved, nnx.Param))
    for name, array in flat_arrays(nnx.state(model, nnx.Param)).items():
        np.testing.assert_array_equal(floats[name], array, err_msg=f"{name}: unrounded")
    spec = SFTArguments(**given).simulated_format
    stored = quantize(saved, {"dtype": spec.dtype, "group_size": spec.group_size})
    codes = dict(nnx.to_flat_state(nnx.state(stored, QuantParam)))
    masters = dict(nnx.to_flat_state(nnx.state(saved, nnx.Param)))
    assert codes.keys() == seen.keys()
    for path, values in seen.items():
        np.testing.assert_array_equal(codes[path].get_value().dense(), values)
        assert np.any(np.asarray(values) != np.asarray(masters[path].get_value()))


@pytest.mark.nightly
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("fields", [{}, {"batch_invariant": True}], ids=["plain", "invariant"])
def test_rounded_training_resumes_bit_for_bit(tmp_path, adapters, fields):
    def model():
        made = learner(**fields)
        return made.apply_lora(LoraSpec(rank=2), seed=1) if adapters else made

    given = {**AFFINE, "max_training_steps": 6, "optimizer": "adamw", "learning_rate": 0.01}
    whole, parts = model(), model()
    trainer(whole, tmp_path / "whole", **given).train()
    stop = StopAt(2, lambda t: t.stop("the test"))
    trainer(model(), tmp_path / "parts", callbacks=[stop], **given).train()
    trainer(parts, tmp_path / "parts", **given).train()
    assert exact(tmp_path / "parts") == exact(tmp_path / "whole")
    for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (whole, parts)), strict=True):
        np.testing.assert_array_equal(a, b)
    if adapters:
        merged = AutoEasyDeLModelForCausalLM.from_pretrained(
            tmp_path / "whole" / "model",
            dtype="float32",
            param_dtype="float32",
            sharding_axis_dims=(1, 1, 1, 1, 1),
        )
        ids = np.arange(1, 13).reshape(1, 12)
        outputs = [np.asarray(m(ids).logits) for m in (merged, whole)]
        np.testing.assert_allclose(*outputs, atol=2e-5)


@pytest.mark.nightly
def test_a_format_is_set_once(tmp_path):
    model = learner()
    spec = SFTArguments(**AFFINE).simulated_format
    assert spec is not None
    simulate_in_place(model, spec)
    trainer(model, tmp_path, **AFFINE)  # the same format again
    with pytest.raises(ConfigError, match="simulates int4 by other settings"):
        trainer(model, tmp_path, quantization_mode="nf4")
    with pytest.raises(ConfigError, match="a state has them already"):
        trainer(EasyDeLState.create(model=learner()), tmp_path, **AFFINE)
    with pytest.raises(ConfigError, match="codes cannot be quantized again"):
        trainer(
            learner().quantize({"dtype": "nf4"}).apply_lora(LoraSpec(rank=2)), tmp_path, **AFFINE
        )
