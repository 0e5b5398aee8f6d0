"""Families with experts: the auxiliary loss, selection biases, and numbers that no row shows."""

import importlib

import jax
import numpy as np
import pytest
from ed_infra import parameter_names
from ed_infra.testing import require_torch
from ed_layers.updated import apply_updates
from ed_models.conformance import Subject, forward
from ed_models.families.glm4_moe import Glm4MoeForCausalLM
from ed_models.families.llama4 import Llama4TextForCausalLM
from ed_models.families.mixtral import MixtralForCausalLM
from ed_models.tasks.causal_lm import CausalLM
from flax import nnx

from tests.conformance.cases import cases


@pytest.mark.daily("True")
@pytest.mark.parametrize("scan", [True, False])
def test_the_auxiliary_loss_is_that_of_transformers(scan):
    torch = require_torch()
    subject = Subject("mixtral", "two of eight", MixtralForCausalLM, cases("mixtral")["mixtral"])
    theirs = subject.torch_model(
        input_ids=torch.tensor(subject.ids, dtype=torch.long),
        attention_mask=torch.tensor(subject.mask),
        output_router_logits=True,
    ).aux_loss.detach()
    model = subject.load(output_router_logits=True, router_aux_loss_coef=0.5, scan_layers=scan)
    out = forward(model, input_ids=subject.ids, attention_mask=subject.mask)
    assert set(out.losses) == {"router_balance"}
    assert out.losses["router_balance"].value == pytest.approx(0.5 * float(theirs), rel=1e-5)
    assert np.shape(out.aux["router_load"].sum) == (), "a figure for the log"
    silent = forward(subject.load(scan_layers=scan), input_ids=subject.ids)
    assert not silent.losses
    assert not silent.aux


@pytest.mark.nightly
def test_selection_biases_move_alike_scanned_and_unrolled():
    subject = Subject("glm4_moe", "groups", Glm4MoeForCausalLM, cases("glm4_moe")["glm4_moe"])
    moved = []
    for scan in (True, False):
        model = subject.load(scan_layers=scan, router_bias_rate=0.01)
        before = biases(nnx.state(model))
        updates = forward(model, input_ids=subject.ids).updates
        _, _, other = model.split_module()
        after = biases(apply_updates(other, updates))
        steps = {name: after[name] - before[name] for name in before}
        assert len(steps) == 3, "one for each layer with experts"
        for step in steps.values():
            np.testing.assert_allclose(np.abs(step), 0.01, atol=1e-6)
        moved.append(steps)
    for name, step in moved[0].items():
        np.testing.assert_allclose(step, moved[1][name], atol=1e-6)


def biases(state):
    """Selection biases by canonical name."""
    found = {}
    for path, variable in nnx.to_flat_state(state):
        if "e_score_correction_bias" in path:
            value = np.asarray(variable.get_value())
            rows = value if parameter_names.is_stacked(path) else [value]
            found |= dict(zip(parameter_names.canonical(path), rows, strict=True))
    return found


@pytest.mark.nightly
def test_queries_of_llama4_grow_with_their_place():
    """transformers counts padding as places, so that only whole rows can be compared."""
    torch = require_torch()
    subject = Subject(
        "llama4_text", "chunks", Llama4TextForCausalLM, cases("llama4_text")["llama4_text"]
    )
    subject.fields |= {"floor_scale": 4, "attn_scale": 0.5}
    with torch.no_grad():
        theirs = subject.torch_model(torch.tensor(subject.ids, dtype=torch.long)).logits
    np.testing.assert_allclose(subject.logits, theirs.numpy(), atol=1e-4)


@pytest.mark.nightly
def test_experts_of_published_qwen3_vl_moe_checkpoints_have_swapped_dimensions(tmp_path):
    from ed_models.families.qwen3_vl_moe import Qwen3VLMoeTextConfig, Qwen3VLMoeTextForCausalLM
    from safetensors.numpy import load_file, save_file

    fields = cases("qwen3_vl_moe_text")["qwen3_vl_moe_text"].rows["biases"]
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 8}
    config = Qwen3VLMoeTextConfig(
        **{**fields, **sizes, "num_hidden_layers": 1}, sharding_axis_dims=(1, 1, 1, 1, 1)
    )
    model = Qwen3VLMoeTextForCausalLM.create(config, seed=0)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    turned = {n: np.swapaxes(x, 1, 2).copy() for n, x in tensors.items() if ".experts." in n}
    assert len(turned) == 2
    save_file({**tensors, **turned}, file)
    loaded = Qwen3VLMoeTextForCausalLM.from_pretrained(tmp_path)
    ids = np.array([[1, 5, 2]])
    np.testing.assert_allclose(loaded(ids).logits, model(ids).logits, atol=1e-6)


@pytest.mark.daily("mixtral-True")
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize(
    "family", ["mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe", "phimoe", "dbrx", "gpt_oss"]
)
def test_returned_experts_repeat_the_forward_pass(family, scan):
    """Given experts replace the routers' choice, for each layer and each token."""
    require_torch()
    module = f"ed_models.families.{family}"
    causal = next(
        one
        for one in vars(importlib.import_module(module)).values()
        if isinstance(one, type) and issubclass(one, CausalLM) and one.__module__ == module
    )
    known = cases(family)[family]
    subject = Subject(family, next(iter(known.rows)), causal, known)
    graphdef, state = nnx.split(subject.load(scan_layers=scan))

    @jax.jit
    def run(routed_experts):
        inputs = {"input_ids": subject.ids, "attention_mask": subject.mask}
        model = nnx.merge(graphdef, state)
        out = model(**inputs, routed_experts=routed_experts, output_routed_experts=True)
        return out.logits, out.routed_experts

    like = jax.eval_shape(run, None)[1]
    assert like.shape[:2] == subject.ids.shape
    layers = like.shape[2]
    logits, experts = map(np.asarray, run(np.full(like.shape, -1, np.int16)))
    own = [n for n in range(layers) if experts[:, :, n].max() >= 0]
    assert own and all((experts[:, :, n] >= 0).all() for n in own)
    repeated, again = map(np.asarray, run(experts))
    np.testing.assert_array_equal(again, experts)
    np.testing.assert_allclose(repeated, logits, atol=1e-5)
    # Other experts of the last token change its logits, and those of no earlier token.
    other = experts.copy()
    other[:, -1:, own] = (experts[:, -1:, own] + 1) % (experts[:, :, own].max() + 1)
    moved, given = map(np.asarray, run(other))
    np.testing.assert_array_equal(given, other)
    np.testing.assert_array_equal(moved[:, :-1], repeated[:, :-1])
    assert np.abs(moved[:, -1] - repeated[:, -1]).max() > 1e-5
