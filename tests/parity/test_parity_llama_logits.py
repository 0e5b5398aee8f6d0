"""A Llama that torch `transformers` saved has the same logits here, and vice versa."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from ed_models import AutoEasyDeLModelForCausalLM
from flax import nnx

from tests.parity import llama_cases

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("parity")]
torch = pytest.importorskip("torch")

TOLERANCE = 2e-5  # logits reach 4.8; the limit is 1e-4, measured differences reach 7.4e-6
ONE = (1, 1, 1, 1, 1)
MESHES = [(1, 8, 1, 1, 1), (2, 2, 1, 2, 1), (1, 1, 1, 8, 1), (1, 2, 1, 2, 2)]


def load(directory, dims=ONE, **config_kwargs):
    return AutoEasyDeLModelForCausalLM.from_pretrained(
        directory, sharding_axis_dims=dims, config_kwargs=config_kwargs
    )


def logits_of(model, reference):
    graphdef, state = nnx.split(model)

    @jax.jit
    def forward(state, ids, mask):
        return nnx.merge(graphdef, state)(ids, attention_mask=mask).logits

    return np.asarray(forward(state, reference.ids, reference.mask))


def difference(got, reference):
    """Return the largest difference at real tokens; values at padding are undefined."""
    return float(np.abs(got - reference.logits)[reference.mask != 0].max())


@pytest.mark.parametrize("scan_layers", [True, False], ids=["scanned", "unrolled"])
@pytest.mark.parametrize("case", list(llama_cases.CASES))
@pytest.mark.daily("tied-scanned", "bf16-scanned", "untied-unrolled")
def test_single_device_logits_match_torch(references, record_property, case, scan_layers):
    reference = references(case)
    model = load(reference.directory, scan_layers=scan_layers)
    assert model.config.mesh.size == 1
    error = difference(logits_of(model, reference), reference)
    record_property("summary", f"parity with torch, llama {case}, scan={scan_layers}: {error:.1e}")
    assert error < TOLERANCE


@pytest.mark.parametrize("dims", MESHES, ids=lambda dims: "x".join(map(str, dims)))
@pytest.mark.daily("2x2x1x2x1")
def test_eight_device_logits_match_torch(references, record_property, dims):
    reference = references("untied")
    model = load(reference.directory, dims)
    assert model.config.mesh.size == 8
    error = difference(logits_of(model, reference), reference)
    record_property("summary", f"parity with torch, llama untied, mesh {dims}: {error:.1e}")
    assert error < TOLERANCE


def test_unrolled_tied_model_on_eight_devices_matches_torch(references):
    reference = references("tied")
    model = load(reference.directory, (2, 2, 1, 2, 1), scan_layers=False)
    assert difference(logits_of(model, reference), reference) < TOLERANCE


def test_bfloat16_checkpoint_matches_torch_in_float32(references):
    reference = references("bf16")
    model = load(reference.directory)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(model))} == {"float32"}
    stored = reference.model.model.layers[1].mlp.down_proj.weight.detach().numpy()
    run = model.model.layers.run_0_3_1[0]
    np.testing.assert_array_equal(np.asarray(run.mlp.down_proj.kernel.get_value())[1], stored.T)


@pytest.mark.parametrize(
    ("case", "dims", "scan_layers"),
    [("untied", (1, 2, 1, 2, 2), True), ("tied", ONE, False)],
    ids=["untied, sharded, scanned", "tied, unrolled"],
)
@pytest.mark.daily("tied, unrolled")
def test_torch_loads_saved_model(references, tmp_path, case, dims, scan_layers):
    import transformers

    reference = references(case)
    model = load(reference.directory, dims, scan_layers=scan_layers)
    model.save_pretrained(tmp_path / "saved", max_shard_size="30KB")
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", output_loading_info=True
    )
    assert not any(info.values()), info
    assert type(again) is transformers.LlamaForCausalLM
    assert again.dtype is torch.float32
    got = llama_cases.run(again.eval(), reference.ids, reference.mask, reference.position_ids)
    np.testing.assert_array_equal(got, reference.logits)
    for name, value in reference.model.state_dict().items():
        np.testing.assert_array_equal(again.state_dict()[name].numpy(), value.numpy())


def test_torch_loads_saved_bfloat16_model(references, tmp_path):
    import transformers

    reference = references("bf16")
    load(reference.directory).save_pretrained(tmp_path / "saved", dtype="bfloat16")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.dtype is torch.bfloat16
    for name, value in reference.model.state_dict().items():
        np.testing.assert_array_equal(again.state_dict()[name].float().numpy(), value.numpy())
