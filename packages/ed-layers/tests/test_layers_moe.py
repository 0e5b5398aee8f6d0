"""Experts: three methods and many devices give one result; routing, losses, biases."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.masks import MaskInfo
from ed_infra.outputs import LayerReport
from ed_infra.sharding import placement
from ed_infra.testing import require_torch
from ed_layers.context import Ctx
from ed_layers.mlp import GatedMLP
from ed_layers.moe.experts import Experts, build_blocks
from ed_layers.moe.groups import over_groups
from ed_layers.moe.layer import Router, SparseMLP, balance
from ed_layers.parts import Parts
from ed_layers.updated import apply_updates
from flax import nnx
from jax.sharding import PartitionSpec as P

B, S, D, F = 4, 8, 16, 24
METHODS = {
    "fused": {"moe_method": "fused_moe", "moe_force_xla_gmm": True},
    "standard": {"moe_method": "standard_moe"},
    "dense": {"moe_method": "dense_moe"},
}


class Config(EasyDeLBaseConfig):
    """What families have besides."""

    hidden_act: str = "silu"
    initializer_range: float = 0.3
    use_bias: bool = False
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.0


def config(dims=(1, 1, 1, 1, 1), **fields):
    sizes: dict[str, Any] = {"hidden_size": D, "num_attention_heads": 2}
    return Config(**sizes, sharding_axis_dims=dims, **fields)


def context(config=None, pad=0, mode: Any = "train"):
    segments = np.ones((B, S), np.int32)
    segments[1, :pad] = 0
    mask = MaskInfo.from_segments(segments)
    return Ctx(mask.q_index, {}, mask_info=mask, config=config, mode=mode)


def randomized(module):
    """Give every parameter a value, because biases start at zero."""
    state = nnx.state(module, nnx.Param)
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(state))))
    nnx.update(module, jax.tree.map(lambda a: jax.random.normal(next(keys), a.shape) * 0.3, state))
    return module


def experts(count, bias=False, **fields):
    return randomized(Experts(Parts(config(**fields), nnx.Rngs(0)), count, F, bias=bias))


def choices(count, k, seed=0):
    """Experts of each token, except the last two experts; one token without experts."""
    rng = np.random.default_rng(seed)
    chosen = np.argsort(rng.random((B, S, max(count - 2, k))), axis=-1)[..., :k]
    chosen[2, 3] = count
    return jnp.asarray(chosen, jnp.int32), jnp.asarray(rng.random((B, S, k)), jnp.float32)


def inputs():
    return jnp.asarray(np.random.default_rng(3).normal(size=(B, S, D)), jnp.float32)


def one_by_one(module, x, chosen, weights):
    """Return the sum over a token's experts, as in the definition."""
    p = {name: np.asarray(v.get_value()) for name, v in variables(module).items()}

    def layer(name, e, x):
        return x @ p[f"{name}.kernel"][e] + p.get(f"{name}.bias", np.zeros((99, 1)))[e]

    out = np.zeros(x.shape)
    for at in np.ndindex(chosen.shape):
        if (e := int(chosen[at])) < p["up_proj.kernel"].shape[0]:
            row = np.asarray(x[at[:2]], np.float64)
            gate, up = layer("gate_proj", e, row), layer("up_proj", e, row)
            out[at[:2]] += weights[at] * layer("down_proj", e, gate / (1 + np.exp(-gate)) * up)
    return out


def variables(module):
    return {".".join(map(str, path)): v for path, v in nnx.to_flat_state(nnx.state(module))}


def run(module, x, chosen, weights, ctx, upstream):
    """Output, and the gradients of inputs, weights and parameters."""
    graphdef, state = nnx.split(module)

    @jax.jit
    def both(state, x, weights):
        def scalar(state, x, weights):
            y = nnx.merge(graphdef, state)(x, chosen, weights, ctx)
            return jnp.sum(y * upstream), y

        grads, y = jax.grad(scalar, argnums=(0, 1, 2), has_aux=True)(state, x, weights)
        return y, grads

    return both(state, x, weights)


def near(got, expected, bound=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=bound), got, expected)


@pytest.mark.daily("40-2")
@pytest.mark.parametrize(("count", "k"), [(6, 3), (40, 2), (3, 1)])
def test_expert_methods_produce_same_outputs_and_gradients(count, k):
    (chosen, weights), x = choices(count, k), inputs()
    upstream = jnp.asarray(np.random.default_rng(4).normal(size=(B, S, D)), jnp.float32) / 8
    bias = count == 6
    results = {
        name: run(experts(count, bias, **fields), x, chosen, weights, context(), upstream)
        for name, fields in METHODS.items()
    }
    near(results["dense"][0], one_by_one(experts(count, bias), x, chosen, weights))
    for name in ("fused", "standard"):
        near(results[name], results["dense"])
    assert not np.asarray(results["standard"][0][2, 3]).any(), "a token without experts"


@pytest.mark.parametrize("absent", [False, True])
def test_grouped_rows_find_their_experts_without_a_loop(absent: bool):
    """An expert without tokens, and with `absent` pairs whose expert is on another device."""
    rng = np.random.default_rng(3)
    x, kernel, bias = (rng.normal(size=shape) for shape in ((6, 4), (5, 4, 3), (5, 3)))
    chosen = rng.choice([0, 1, 3, 4] + [5] * absent, size=(6, 2))
    weights = rng.uniform(size=(6, 2))

    def compute(x, chosen, weights):
        params = {"up_proj.kernel": jnp.asarray(kernel), "up_proj.bias": jnp.asarray(bias)}
        return over_groups(lambda rows, of: of("up_proj", rows), None, x, chosen, weights, params)

    found = jax.jit(compute)(x, chosen, weights)
    rows = [
        sum(w * (row @ kernel[e] + bias[e]) for e, w in zip(experts, ws, strict=True) if e < 5)
        for row, experts, ws in zip(x, chosen, weights, strict=True)
    ]
    np.testing.assert_allclose(found, np.array(rows), rtol=1e-5, atol=1e-5)
    program = str(jax.make_jaxpr(compute)(x, chosen, weights))
    # Each iteration of a loop over all layers has several launches on a GPU.
    assert "while" not in program and "scan[" not in program


@pytest.mark.nightly
@pytest.mark.proves("moe_method", "moe_force_xla_gmm")
def test_the_configuration_chooses_the_method():
    (chosen, weights), x = choices(6, 2), inputs()

    def operations(**fields):
        text = str(jax.make_jaxpr(experts(6, **fields))(x, chosen, weights, context()))
        return [name for name in ("ragged_dot", "while") if f" {name}" in text]

    assert operations() == operations(moe_method="standard_moe") == ["while"]
    assert operations(moe_force_xla_gmm=True) == ["ragged_dot"]
    assert operations(moe_method="dense_moe") == []


@pytest.mark.nightly
def test_the_standard_way_does_no_needless_products():
    for tokens, count, k in ((512, 16, 2), (3, 64, 8), (64, 4, 4)):
        chosen = np.argsort(np.random.default_rng(0).random((tokens, count)))[:, :k]
        plan = jax.jit(build_blocks, static_argnums=1)(jnp.asarray(chosen), count)
        rows = int(plan.used) * plan.size
        assert tokens * k <= rows <= 2 * tokens * k, (tokens, count, k, rows)
    plan = jax.jit(build_blocks, static_argnums=1)(jnp.full((64, 4), 4), 4)
    assert int(plan.used) == 0, "padding costs nothing"


MESHES = {
    "ep": (1, 1, 4, 1, 1),
    "ep and tp": (1, 1, 2, 2, 2),
    "all": (1, 2, 2, 2, 1),
    "fsdp": (2, 4, 1, 1, 1),
}
UNBOUND = {"fsdp_is_ep_bound": False, "sp_is_ep_bound": False}
RING = {"use_ring_of_experts": True}
TENSOR = {"use_expert_tensor_mode": True}


@functools.cache
def on_one_device(method):
    """Return the reference of the meshes."""
    (chosen, weights), x = choices(8, 3), inputs()
    upstream = jnp.asarray(np.random.default_rng(4).normal(size=(B, S, D)), jnp.float32) / 8
    module = experts(8, True, **METHODS[method])
    case = module, x, chosen, weights, upstream
    return case, run(module, x, chosen, weights, context(), upstream)


@pytest.mark.daily("ep and tp-dense-fields5")
@pytest.mark.parametrize(
    ("mesh", "method", "fields"),
    [
        *((mesh, "standard", {}) for mesh in MESHES),
        ("ep and tp", "fused", {}),
        ("ep and tp", "dense", {}),
        ("fsdp", "standard", UNBOUND),
        ("ep and tp", "standard", UNBOUND),
        ("ep", "standard", RING),
        ("fsdp", "fused", RING),
        ("ep and tp", "dense", RING),
        ("all", "standard", TENSOR),
        ("all", "standard", TENSOR | RING),
    ],
)
def test_many_devices_are_as_one(mesh, method, fields):
    (module, x, chosen, weights, upstream), expected = on_one_device(method)
    placed = config(MESHES[mesh], **fields)
    got = run(placement.shard(module, placed), x, chosen, weights, context(placed), upstream)
    near(got, expected)


@pytest.mark.nightly
@pytest.mark.parametrize("favourites", [0, 5])
def test_rows_that_all_come_to_one_device(favourites):
    (_, weights), x = choices(8, 2), inputs()
    chosen = jnp.broadcast_to(jnp.asarray([favourites, favourites + 1]), (B, S, 2))
    upstream = jnp.ones((B, S, D))
    module = experts(8, True, **METHODS["fused"])
    expected = run(module, x, chosen, weights, context(), upstream)
    near(expected[0], one_by_one(module, x, chosen, weights))
    placed = config((1, 1, 4, 1, 1))
    got = run(placement.shard(module, placed), x, chosen, weights, context(placed), upstream)
    near(got, expected, bound=3e-5)  # gradients here are sums over all tokens


@pytest.mark.nightly
@pytest.mark.parametrize("fields", [{}, RING])
def test_a_number_of_experts_that_does_not_divide(fields):
    (chosen, weights), x = choices(5, 2), inputs()
    expected = one_by_one(experts(5), x, chosen, weights)
    placed = config((1, 1, 2, 2, 2), **fields)
    near(call(placement.shard(experts(5), placed), x, chosen, weights, context(placed)), expected)


@pytest.mark.proves("fsdp_is_ep_bound", "sp_is_ep_bound")
@pytest.mark.nightly
def test_expert_sharding_uses_bound_axes_that_divide():
    def kernel_of(count, dims, **fields):
        module = experts(count)
        return placement.specs(nnx.state(module), config(dims, **fields)).up_proj.kernel

    every = (1, 2, 2, 1, 2)
    assert kernel_of(8, every) == P(("fsdp", "ep", "sp"))
    assert kernel_of(4, every) == P(("fsdp", "ep"))
    assert kernel_of(2, every) == P("ep", "fsdp"), "what experts leave splits their matrices"
    assert kernel_of(8, every, fsdp_is_ep_bound=False) == P(("ep", "sp"), "fsdp")
    assert kernel_of(8, every, sp_is_ep_bound=False) == P(("fsdp", "ep"))
    assert kernel_of(5, every) == P(None, "fsdp")
    assert kernel_of(8, (1, 2, 2, 2, 1)) == P(("fsdp", "ep"), None, "tp")
    assert kernel_of(8, (1, 2, 2, 2, 1), **TENSOR) == P(("fsdp", "ep", "tp"))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("dims", "fields", "expected"),
    [
        ((1, 1, 4, 1, 1), {}, {"all-reduce"}),
        ((1, 1, 4, 1, 1), RING, {"all-gather", "collective-permute"}),
        ((1, 4, 1, 1, 1), {}, {"all-gather", "reduce-scatter"}),
        ((1, 4, 1, 1, 1), RING, {"all-gather", "collective-permute"}),
        ((1, 1, 2, 2, 1), TENSOR, {"all-reduce"}),
        ((1, 4, 1, 1, 1), UNBOUND, {"all-gather"}),
    ],
)
@pytest.mark.proves("use_ring_of_experts", "use_expert_tensor_mode")
def test_tokens_move_and_experts_do_not(dims, fields, expected, record_property):
    placed = config(dims, **fields)
    module = placement.shard(experts(8), placed)
    graphdef, state = nnx.split(module)
    chosen, weights = choices(8, 2)

    def forward(state, x):
        y = nnx.merge(graphdef, state)(x, chosen, weights, context(placed))
        return placement.constrain(y, ("batch", "sequence", None), placed)

    text = jax.jit(forward).lower(state, inputs()).compile().as_text()
    assert text is not None
    moved = collectives(text)
    record_property("summary", f"experts on {dims}, {fields}: {', '.join(map(str, moved))}")
    print(dims, fields, *moved, sep="\n  ")
    assert {name for name, _ in moved} == expected
    # Arrays of tokens do not end as matrices do. Only fsdp that splits matrices collects them.
    matrices = [shape for _, shape in moved if shape[-2:] in ((D, F), (F, D))]
    assert len(matrices) == (3 if fields is UNBOUND else 0), moved


def collectives(text):
    """The collectives of a compiled program: name, and shape of the result."""
    names = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf"= \w+\[([\d,]*)\]\S* ({names})(?:-start)?\(", text)
    return [(name, tuple(map(int, shape.split(",")))) for shape, name in found]


def call(module, *args):
    """Call a module jitted."""
    graphdef, state = nnx.split(module)
    return jax.jit(lambda state, args: nnx.merge(graphdef, state)(*args))(state, args)


def sparse(**fields):
    parts = Parts(config(**fields), nnx.Rngs(0))
    gate = Router(parts, 6, 2, selection_bias=True, score="sigmoid")
    return SparseMLP(
        parts, gate=gate, experts=Experts(parts, 6, F), shared=GatedMLP(parts, F), shared_gate=True
    )


@pytest.mark.nightly
def test_padding_changes_nothing_and_counts_nothing():
    module, x = sparse(router_z_loss_coef=0.1, output_router_logits=True), inputs()
    whole, report = call(module, x, context())
    out, padded = call(module, x.at[1, :3].set(1e3), context(pad=3))
    near(out[:1], whole[:1])
    near(out[1, 3:], whole[1, 3:])
    name = "gate/e_score_correction_bias"
    assert float(jnp.sum(report.updates[name])) == B * S * 2
    assert float(jnp.sum(padded.updates[name])) == (B * S - 3) * 2
    assert float(padded.losses["router_z"].weight) == B * S - 3
    logits = module.gate.logits(x)
    z = np.square(np.asarray(jax.nn.logsumexp(logits, axis=-1)))
    assert report.losses["router_z"].value == pytest.approx(0.1 * z.mean(), rel=1e-5)
    assert not call(module, x, context(mode="decode"))[1].updates, "only training reports"


@pytest.mark.nightly
def test_experts_have_a_capacity_in_training():
    module, x = sparse(expert_capacity_factor=0.5), inputs()
    ctx = context(pad=3)
    free, _, report = call(sparse().gate, x, ctx)
    assert "router_dropped" not in report.metrics
    chosen, _, report = call(module.gate, x, ctx)
    expected, dropped = np.array(free), 0
    for row in expected:
        taken = np.zeros(7, int)
        for choices_of_token in row:
            for i, e in enumerate(choices_of_token):
                taken[e] += 1
                if e < 6 and taken[e] > math.ceil(0.5 * S * 2 / 6):
                    choices_of_token[i], dropped = 6, dropped + 1
    np.testing.assert_array_equal(chosen, expected)
    metric = report.metrics["router_dropped"]
    assert (float(metric.sum), float(metric.weight)) == (dropped, (B * S - 3) * 2)
    assert dropped > 5
    assert "router_dropped" not in call(module.gate, x, context(mode="decode"))[2].metrics
    # A row alone loses the same tokens as in a batch, on any mesh.
    placed = config((1, 2, 1, 2, 2), expert_capacity_factor=0.5)
    sharded, *_ = call(placement.shard(module.gate, placed), x, context(placed, pad=3))
    np.testing.assert_array_equal(sharded, expected)


@pytest.mark.nightly
def test_inputs_may_be_scaled_instead_of_outputs():
    parts = Parts(config(), nnx.Rngs(0))
    gate = Router(parts, 4, 2, score="sigmoid", normalize=False)
    module = SparseMLP(parts, gate=gate, experts=Experts(parts, 4, F), scale_inputs=True)
    x, ctx = inputs(), context()
    chosen, weights, _ = call(gate, x, ctx)
    expected = sum(
        one_by_one(module.experts, x * weights[..., i, None], chosen[..., [i]], np.ones((B, S, 1)))
        for i in (0, 1)
    )
    near(call(module, x, ctx)[0], expected)


def router(*, logits, per_token=2, bias=None, **form):
    """Choose by logits that are handed in."""
    parts = Parts(config(), nnx.Rngs(0))
    module = Router(parts, logits.shape[-1], per_token, selection_bias=bias is not None, **form)
    if bias is not None:
        module.e_score_correction_bias.set_value(jnp.asarray(bias, jnp.float32))
    chosen, weights = module.choose(jnp.asarray(logits, jnp.float32)[None, None])
    return np.asarray(chosen)[0, 0].tolist(), np.asarray(weights)[0, 0]


LOGITS = np.log([0.1, 0.4, 0.2, 0.3])


@pytest.mark.parametrize(
    ("form", "chosen", "weights"),
    [
        ({"normalize": False}, [1, 3], [0.4, 0.3]),
        ({}, [1, 3], [4 / 7, 3 / 7]),
        ({"scale": 2.5, "normalize": False}, [1, 3], [1.0, 0.75]),
        ({"score": "sigmoid", "normalize": False}, [1, 3], [0.4 / 1.4, 0.3 / 1.3]),
        ({"bias": [0.9, 0, 0, 0], "normalize": False}, [0, 1], [0.1, 0.4]),
        # The best pair is {2, 3}; the best expert is in the other group.
        ({"groups": 2, "normalize": False, "bias": [0, -0.2, 0, 0]}, [3, 2], [0.3, 0.2]),
    ],
)
def test_router_selects_expected_experts_and_weights(form, chosen, weights):
    got, shares = router(logits=LOGITS, **form)
    assert got == chosen
    np.testing.assert_allclose(shares, weights, rtol=1e-5)


def test_a_selection_bias_follows_the_load():
    module = sparse(router_bias_rate=0.01)
    update = call(module, inputs(), context())[1].under("mlp").updates
    holder = nnx.Dict(mlp=module)
    state = apply_updates(nnx.state(holder, nnx.Not(nnx.Param)), update)
    nnx.update(holder, state)
    (load,) = update.values()
    expected = 0.01 * np.sign(np.mean(load) - np.asarray(load))
    near(module.gate.e_score_correction_bias.get_value(), expected)
    assert len(set(expected.tolist())) > 1, "or nothing is tested"
    # If only another layer is trained, such as an adapter, the bias of the router does not change.
    other, trained = nnx.state(holder, nnx.Not(nnx.Param)), nnx.state(holder, nnx.Param)
    assert trained.mlp.pop("gate")
    near(apply_updates(other, update, trained), other, bound=0)


def test_the_balance_of_all_layers_is_that_of_transformers():
    torch = require_torch()
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    settings = config(output_router_logits=True, router_aux_loss_coef=0.02)
    name = "router_balance"
    layers = [Router(Parts(settings, nnx.Rngs(i)), 6, 2) for i in range(3)]
    x, ctx = inputs(), context(pad=3)
    logits = [layer.logits(x) for layer in layers]

    def loss(x):
        report = sum((layer(x, ctx)[2] for layer in layers), LayerReport())
        return balance(report, settings)

    theirs = load_balancing_loss_func(
        tuple(torch.tensor(np.asarray(one)).reshape(-1, 6) for one in logits),
        6,
        2,
        torch.tensor(np.asarray(ctx.real), dtype=torch.int),
    )
    report, gradient = jax.jit(loss), jax.jit(jax.grad(lambda x: loss(x).losses[name].sum))
    assert report(x).losses[name].value == pytest.approx(0.02 * float(theirs), rel=1e-5)
    assert report(x).metrics["router_load"].value >= 1
    assert np.abs(gradient(x)).max() > 0
    assert balance(LayerReport(), settings) == LayerReport()


@pytest.mark.nightly
def test_one_token_is_as_many():
    """A step of one token equals the output of the whole sequence for this token."""
    module, x = sparse(), inputs()
    step = Ctx(jnp.zeros((B, 1), jnp.int32), {}, mode="decode")
    near(call(module, x[:, 5:6], step)[0], call(module, x, context())[0][:, 5:6])
