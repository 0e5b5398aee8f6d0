"""The names of intermediate results of a Llama, and remat by these names on a mesh."""

from __future__ import annotations

import typing
from typing import Any

import jax
import numpy as np
import pytest
from ed_infra.enums import AVAILABLE_GRADIENT_CHECKPOINT_TARGETS
from ed_infra.errors import ConfigError
from ed_infra.testing import tiny_llama
from ed_layers.depth.remat import OUTSIDE, names_in
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from flax import nnx

IDS = np.random.default_rng(0).integers(3, 256, (4, 24)).astype(np.int32)
DOCUMENTED = set(typing.get_args(AVAILABLE_GRADIENT_CHECKPOINT_TARGETS))
# Names of other families: experts, RWKV's receptance, fused projections.
OF_OTHERS = {
    *("moe_expert_output", "moe_gate_logits", "moe_output", "moe_router_logits"),
    *("attn_receptance", "attn_qkv", "attn_key_value"),
}


def config(**changes: Any) -> LlamaConfig:
    fields = tiny_llama(num_hidden_layers=2, initializer_range=0.08)
    del fields["model_type"]
    return LlamaConfig(**{**fields, "sharding_axis_dims": (1, 1, 1, 1, 1), **changes})


def names(**changes: Any) -> set[str]:
    """Names in the program of a forward pass."""
    made = config(**changes)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: LlamaForCausalLM(made, rngs=nnx.Rngs(0))))
    return names_in(jax.make_jaxpr(lambda state: nnx.merge(graphdef, state)(IDS).logits)(state))


def only(*targets: str, **changes: Any) -> dict[str, Any]:
    return {
        "gradient_checkpointing": "save_only_these_names",
        "gradient_checkpointing_targets": targets,
        **changes,
    }


def test_llama_has_every_documented_checkpoint_name():
    everything = DOCUMENTED - OF_OTHERS
    assert len(DOCUMENTED) == 23
    assert names(**only(*everything)) == everything
    lean = names(attn_mechanism="blockwise", use_scan_mlp=True, scan_mlp_chunk_size=8)
    assert lean == everything - {"attn_weights"}


def test_names_of_other_families_are_refused():
    with pytest.raises(ConfigError) as error:
        names(**only(*OF_OTHERS, "mlp_up"))
    missing, own = str(error.value).split("; its layers make: ")
    assert all(name in missing for name in OF_OTHERS)
    assert set(own.split(", ")) == DOCUMENTED - OF_OTHERS - set(OUTSIDE)
    with pytest.raises(ConfigError, match=r"attn_weights.*attn_mechanism='vanilla'"):
        names(**only("attn_weights", attn_mechanism="blockwise"))


def test_serving_does_not_require_remat_target():
    names(**only("moe_output", easy_method="serve"))


@pytest.mark.nightly
@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
@pytest.mark.parametrize(
    "remat",
    [
        {"gradient_checkpointing": "offload_dot_with_no_batch_dims"},
        only("attn_output", "mlp_gate"),
        {
            **only("layer_output", "mlp_gate"),
            "gradient_checkpointing": "save_and_offload_only_these_names",
        },
    ],
    ids=lambda remat: remat["gradient_checkpointing"],
)
def test_on_a_mesh_remat_changes_no_gradient(scan, remat):
    mesh = {"sharding_axis_dims": (1, 2, 1, 2, 2), "scan_layers": scan}

    def gradients(**changes: Any) -> list[np.ndarray]:
        model = LlamaForCausalLM.create(config(**mesh, **changes), seed=1)
        graphdef, params, other = model.split_module()

        def loss(params: Any) -> Any:
            return model.merge_module(graphdef, params, other).compute_loss(IDS)[0].loss

        return [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(params))]

    for got, expected in zip(gradients(**remat), gradients(), strict=True):
        assert np.abs(got - expected).max() <= 1e-6 * np.abs(expected).max()
