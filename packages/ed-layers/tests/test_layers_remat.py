"""Remat policies: equal gradients, stored values, and validated targets."""

from __future__ import annotations

import re
from functools import partial
from types import SimpleNamespace

import depth_case as case
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_layers.depth.remat import BY_NAME, FIXED, Remat, call_with_remat
from ed_layers.norms import LayerNorm, RMSNorm
from flax import nnx
from jax.ad_checkpoint import print_saved_residuals

TARGETS = ("attn_output", "mlp_gate")
IN_LAYER = {
    *("normed_input", "attn_query", "attn_key", "attn_value", "attn_weights", "attn_output"),
    *("attn_dense", "mlp_gate", "mlp_up", "mlp_down", "mlp_output"),
}


def program(policy: str, targets=(), **changes) -> str:
    """jaxpr of the gradient of a stack."""
    loss, state = case.objective(case.stack(policy=policy, targets=targets, **changes))
    return str(jax.make_jaxpr(jax.grad(loss))(state))


def kept(capsys, policy: str, targets=()) -> set[str]:
    """Names of what one layer keeps for its backward pass, besides its arguments."""
    graphdef, state = nnx.split(case.Layer(nnx.Rngs(0)))
    ctx = case.context()

    def layer(state, x):
        return nnx.merge(graphdef, state)(x, ctx, None, 0)[0]

    print_saved_residuals(Remat(policy, tuple(targets)).wrap(layer), state, jnp.asarray(case.X))
    return set(re.findall(r"named '(\w+)'", capsys.readouterr().out))


def test_remat_keeps_no_norm_or_activation_intermediates():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 12, 16)), jnp.float32)

    def kept_by(module: nnx.Module, *arguments) -> list[int]:
        """Widths of the activations."""
        graphdef, state = nnx.split(module)
        run = lambda state, x: nnx.merge(graphdef, state)(x, *arguments)  # noqa: E731
        pull = jax.vjp(run, state, x)[1]
        shapes = (leaf.shape for leaf in jax.tree.leaves(pull))
        return [shape[2] for shape in shapes if shape[:2] == (2, 12)]

    layer = case.Layer(nnx.Rngs(0))
    assert kept_by(layer.mlp, case.context()).count(32) == 3  # gate, up and their product
    assert kept_by(RMSNorm(16)) == kept_by(LayerNorm(16)) == [16]


def test_recomputed_functions_have_unchanged_gradients():
    draw = np.random.default_rng(0).normal
    x, weight = (jnp.asarray(draw(size=shape), jnp.float32) for shape in ((3, 16), (16,)))
    norm = RMSNorm(16).build_function()

    def gradients(run):
        return jax.grad(lambda x, weight: jnp.sum(jnp.sin(run(x, weight))), argnums=(0, 1))

    got = jax.jit(gradients(partial(call_with_remat, norm)))(x, weight)
    for found, expected in zip(got, gradients(norm)(x, weight), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.fixture(
    scope="module",
    params=[True, pytest.param(False, marks=pytest.mark.nightly)],
    ids=["scanned", "unrolled"],
)
def layout(request):
    """Whether it scans, and the gradients without remat."""
    return request.param, case.gradients(case.stack(2, scan=request.param))


USUAL = ("nothing_saveable", "save_and_offload_only_these_names")
policies = [
    pytest.param(policy, marks=() if policy in USUAL else pytest.mark.nightly)
    for policy in [*FIXED, *BY_NAME]
]


@pytest.mark.daily("scanned-save_and_offload_only_these_names")
@pytest.mark.parametrize("policy", policies)
def test_a_policy_changes_no_gradient(layout, policy):
    scan, expected = layout
    targets = TARGETS if policy in BY_NAME else ()
    got = case.gradients(case.stack(2, scan=scan, policy=policy, targets=targets))
    case.assert_same(got, expected, 1e-6)


def test_remat_policy_keeps_exactly_the_targets(capsys):
    assert kept(capsys, "nothing_saveable") == set()
    assert kept(capsys, "save_only_these_names", TARGETS) == set(TARGETS)
    # Values that the backward pass does not use are not stored.
    useful = IN_LAYER - {"attn_dense", "mlp_down", "mlp_output"}
    but = kept(capsys, "save_any_names_but_these", TARGETS)
    assert useful - set(TARGETS) <= but <= IN_LAYER - set(TARGETS)
    attention = {name for name in IN_LAYER if name.startswith("attn_")}
    mlp = {name for name in IN_LAYER if name.startswith("mlp_")}
    assert kept(capsys, "attn_notsaveable") & IN_LAYER >= {"mlp_gate", "mlp_up"}
    assert not kept(capsys, "attn_notsaveable") & attention
    assert not kept(capsys, "mlp_notsaveable") & mlp
    assert not kept(capsys, "mlp_attn_notsaveable") & (attention | mlp)


@pytest.mark.nightly
def test_targets_move_to_the_host():
    """Each layer's result and, as `layer_output`, the stream between layers."""
    for targets in (("mlp_up",), ("layer_output", "mlp_up")):
        text = program("save_and_offload_only_these_names", targets)
        assert text.count("f32<host>[2,12,") >= len(targets)
    assert "<host>" in program("offload_dot_with_no_batch_dims")
    assert "<host>" not in program("save_only_these_names", ("mlp_up",))


@pytest.mark.nightly
def test_blockwise_attention_is_not_run_again_where_its_output_is_kept():
    def loops(policy, targets=()):
        text = program(policy, targets, vary=lambda i: {"mechanism": "blockwise"})
        return len(re.findall(r"\bexp\b", text))

    forward_again = loops("nothing_saveable") - loops("save_only_these_names", ("attn_output",))
    assert forward_again > 0
    assert loops("save_only_these_names", ("mlp_up",)) == loops("nothing_saveable")


@pytest.mark.daily("scanned")
@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
def test_a_target_that_no_layer_makes_is_refused(scan):
    def run(*targets, **changes):
        stack = case.stack(scan=scan, policy="save_only_these_names", targets=targets, **changes)
        return stack(jnp.asarray(case.X), case.context())

    with pytest.raises(ConfigError, match=r"makes moe_output; its layers make: attn_dense, .*mlp_"):
        run("moe_output", "mlp_up")
    with pytest.raises(ConfigError, match=r"attn_weights.*attn_mechanism='vanilla'"):
        run("attn_weights", vary=lambda i: {"mechanism": "blockwise"})
    run("attn_weights", "embeddings", "layer_output")  # kept in any case, or made by vanilla


def test_targets_do_not_matter_where_nothing_is_trained():
    stack = case.stack(policy="save_only_these_names", targets=("moe_output",))
    stack(jnp.asarray(case.X), case.context(mode="prefill"))


@pytest.mark.parametrize(
    ("policy", "targets", "message"),
    [
        ("nothing_savable", (), "did you mean 'nothing_saveable'"),
        ("save_only_these_names", (), "needs gradient_checkpointing_targets"),
        ("save_and_offload_only_these_names", (), "needs gradient_checkpointing_targets"),
        ("nothing_saveable", ("mlp_up",), "takes no gradient_checkpointing_targets"),
        ("save_any_names_but_these", ("mlp_up", "embeddings"), "no say over embeddings: "),
        ("save_anything_except_these_names", ("layer_output",), "no say over layer_output"),
        ("save_and_offload_only_these_names", ("model_output",), "no say over model_output"),
    ],
)
def test_contradictory_remat_options_raise_config_error(policy, targets, message):
    with pytest.raises(ConfigError, match=message):
        Remat(policy, targets)


def test_offload_needs_pinned_host_memory():
    def config(*kinds, policy="offload_dot_with_no_batch_dims", easy_method="train"):
        memories = [SimpleNamespace(kind=kind) for kind in kinds]
        device = SimpleNamespace(platform="cpu", addressable_memories=lambda: memories)
        return SimpleNamespace(
            gradient_checkpointing=policy,
            gradient_checkpointing_targets=None,
            easy_method=easy_method,
            mesh=SimpleNamespace(local_devices=[device]),
        )

    with pytest.raises(ConfigError, match=r"pinned host memory.*memories: unpinned_host\): take a"):
        Remat.resolve(config("unpinned_host"))
    assert Remat.resolve(config("device", "pinned_host")).name == "offload_dot_with_no_batch_dims"
    Remat.resolve(config("unpinned_host", easy_method="serve"))
    assert Remat.resolve(config("unpinned_host", policy="nothing_saveable")).targets == ()


@pytest.mark.nightly
@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
def test_the_compiler_does_not_merge_recomputation_away(scan):
    def flops(policy):
        loss, state = case.objective(case.stack(2, scan=scan, policy=policy))
        return jax.jit(jax.grad(loss)).lower(state).compile().cost_analysis()["flops"]

    assert flops("nothing_saveable") > 1.15 * flops("")
