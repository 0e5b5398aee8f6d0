"""Many feed-forward networks of which a token visits a few, and the ways to compute them.

Legend: b batch, s sequence, d hidden, f intermediate, e experts, k experts of a token, n tokens,
r rows: pairs of a token and an expert, in the order of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ed_infra.partition import fit_spec
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from ed_layers.attention.devices import axes_of, platform_of, ways
from ed_layers.context import Ctx
from ed_layers.linear import Axes
from ed_layers.mlp import activation
from ed_layers.parts import Parts

#: The arrays of all experts, or of one: "up_proj.kernel", "up_proj.bias" and so on.
Params = Mapping[str, jax.Array]
#: `(name of a layer, x) -> y`: how the rows of `x` meet the matrices of their experts.
Product = Callable[[str, jax.Array], jax.Array]
#: A feed-forward network, whichever its matrices are.
Network = Callable[[jax.Array, Product], jax.Array]


class ExpertLinear(nnx.Module):
    """The linear layers of all experts: kernel [e, in, out], bias [e, out].

    Args:
        parts: says dtypes and initialisation.
        experts: e.
        inputs, outputs: sizes.
        axes: logical axes of one kernel, (in, out).
        bias: whether there are biases.
    """

    def __init__(
        self, parts: Parts, experts: int, inputs: int, outputs: int, *, axes: Axes, bias: bool
    ):
        shape = (experts, inputs, outputs)
        kernel = parts.initializer(parts.rngs.params(), shape, parts.param_dtype)
        self.kernel = nnx.Param(kernel, axes=("expert", *axes))
        if bias:
            zeros = jnp.zeros((experts, outputs), parts.param_dtype)
            self.bias = nnx.Param(zeros, axes=("expert", axes[1]))


class Experts(nnx.Module):
    """Feed-forward networks `down(act(gate(x)) * up(x))`, stacked along the first axis.

    `moe_method` of the configuration says how they are computed, with the same numbers:

    - `fused_moe`: rows sorted by expert, grouped products (`jax.lax.ragged_dot`). On a CPU that
      would cost e times the products, so there it is `standard_moe`, unless `moe_force_xla_gmm`;
    - `standard_moe`: rows sorted by expert, a loop over blocks of rows that share an expert;
    - `dense_moe`: every expert on every token.

    On a mesh each device computes its own experts (`ep`) and its own part of f (`tp`) on the tokens
    that it has, and the results are added up: tokens do not move, nor do experts.

    Args:
        parts: makes the layers.
        experts: e.
        intermediate_size: f.
        hidden_act: Hugging Face's name of the activation; default: the configuration's.
        bias: of all layers.
        gated: whether there is a gate; `down(act(up(x)))` without one (Nemotron-H).
        features: d; default: the configuration's `hidden_size`.
    """

    def __init__(
        self,
        parts: Parts,
        experts: int,
        intermediate_size: int,
        *,
        hidden_act: str | None = None,
        bias: bool = False,
        gated: bool = True,
        features: int | None = None,
    ):
        config = parts.config
        d, f = features or config.hidden_size, intermediate_size
        make = partial(ExpertLinear, parts, experts, bias=bias)
        if gated:
            self.gate_proj = make(d, f, axes=("embed", "mlp"))
        self.up_proj = make(d, f, axes=("embed", "mlp"))
        self.down_proj = make(f, d, axes=("mlp", "embed"))
        self.gated, self.hidden_act = gated, hidden_act or config.hidden_act
        activation(self.hidden_act)
        self.dtype, self.precision = parts.dtype, parts.precision
        self.method, self.force_grouped = config.moe_method, config.moe_force_xla_gmm

    def glu(self, gate: Float[Array, "r f"], up: Float[Array, "r f"]) -> Float[Array, "r f"]:
        """What stands between the layers."""
        return self.act(gate) * up

    def network(self, x: Float[Array, "r d"], product: Product) -> Float[Array, "r d"]:
        """One expert, whichever the product takes."""
        up = product("up_proj", x)
        inner = self.glu(product("gate_proj", x), up) if self.gated else self.act(up)
        return product("down_proj", inner)

    def act(self, x: Float[Array, "r f"]) -> Float[Array, "r f"]:
        """The activation."""
        return activation(self.hidden_act)(x)

    def __call__(
        self,
        x: Float[Array, "b s d"],
        chosen: Int[Array, "b s k"],
        weights: Float[Array, "b s k"],
        ctx: Ctx,
    ) -> Float[Array, "b s d"]:
        """Return the weighted sum of the outputs of each token's experts.

        Args:
            chosen: numbers of the experts; e and beyond = none (padding).
            weights: of their outputs.
        """
        x = x.astype(self.dtype)
        variables = {".".join(map(str, path)): v for path, v in nnx.to_flat_state(nnx.state(self))}
        params = {name: variable.get_value() for name, variable in variables.items()}
        config = ctx.config
        if config is None or config.mesh.size == 1:
            return self.local(x, chosen, weights, params, ctx)
        mesh = config.mesh

        def spec_of(variable: nnx.Variable) -> PartitionSpec:
            axes = [None if a == "embed" else a for a in variable.get_metadata()["axes"]]
            spec = config.partition_manager.param(axes)
            return fit_spec(spec, variable.get_value().shape, mesh)[0]

        specs = {name: spec_of(variable) for name, variable in variables.items()}
        split = (*specs["up_proj.kernel"], None, None, None)
        by_expert, by_feature = names_of(split[0]), names_of(split[2])
        mode = "decode" if ctx.mode == "decode" else "train"
        # A mesh axis that splits the experts does not split the tokens too: each device sees them.
        rows = [
            tuple(name for name in names_of(axes) if name not in by_expert + by_feature) or None
            for axes in axes_of(config, ("batch", "sequence", None), x.shape, mode)
        ]
        tokens = PartitionSpec(*rows)

        def body(x: jax.Array, chosen: jax.Array, weights: jax.Array, params: Any) -> jax.Array:
            own = params["up_proj.kernel"].shape[0]
            first = jax.lax.axis_index(by_expert) * own if by_expert else 0
            # Expert numbers of this device; those of others are beyond the last.
            here = (chosen >= first) & (chosen < first + own)
            if "down_proj.bias" in params:  # each device that has a part of f adds a part of it
                part = params["down_proj.bias"] / ways(mesh, by_feature)
                params = {**params, "down_proj.bias": part}
            local = jnp.where(here, chosen - first, own)
            out = self.local(x, local, weights, params, ctx)
            return jax.lax.psum(out, by_expert + by_feature)

        run = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(tokens, tokens, tokens, specs),
            out_specs=tokens,
            check_vma=False,
        )
        return run(x, chosen, weights, params)

    def local(
        self,
        x: Float[Array, "b s d"],
        chosen: Int[Array, "b s k"],
        weights: Float[Array, "b s k"],
        params: Params,
        ctx: Ctx,
    ) -> Float[Array, "b s d"]:
        """The experts `params`, on the tokens of one device."""
        flat, k = x.reshape(-1, x.shape[-1]), chosen.shape[-1]
        experts = params["up_proj.kernel"].shape[0]
        chosen, weights = chosen.reshape(-1, k), weights.reshape(-1, k).astype(jnp.float32)
        weights = jnp.where(chosen < experts, weights, 0.0)
        grouped = self.force_grouped or platform_of(ctx.config) != "cpu"
        if self.method == "dense_moe":
            out = dense(self.network, self.precision, flat, chosen, weights, params)
        elif self.method == "fused_moe" and grouped:
            out = over_groups(self.network, self.precision, flat, chosen, weights, params)
        else:
            plan = blocks_of(chosen, experts)
            out = over_blocks(self.network, self.precision, flat, weights, params, plan)
        return jnp.asarray(out, x.dtype).reshape(x.shape)


def names_of(axes: Any) -> tuple[str, ...]:
    """Mesh axes of one dimension."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def product_of(params: Params, precision: Any) -> Product:
    """The layers of one expert."""

    def product(name: str, x: jax.Array) -> jax.Array:
        y = jnp.matmul(x, params[f"{name}.kernel"].astype(x.dtype), precision=precision)
        bias = params.get(f"{name}.bias")
        return y if bias is None else y + bias.astype(x.dtype)

    return product


def dense(
    network: Network,
    precision: Any,
    x: Float[Array, "n d"],
    chosen: Int[Array, "n k"],
    weights: Float[Array, "n k"],
    params: Params,
) -> Float[Array, "n d"]:
    """Every expert on every token."""
    experts = params["up_proj.kernel"].shape[0]
    each = jax.vmap(lambda own: network(x, product_of(own, precision)))(params)
    shares = jnp.sum(jax.nn.one_hot(chosen, experts) * weights[..., None], axis=1)
    return jnp.einsum("end,ne->nd", each.astype(jnp.float32), shares, precision=precision)


def over_groups(
    network: Network,
    precision: Any,
    x: Float[Array, "n d"],
    chosen: Int[Array, "n k"],
    weights: Float[Array, "n k"],
    params: Params,
) -> Float[Array, "n d"]:
    """Rows sorted by expert, one grouped product for each layer."""
    (n, k), experts = chosen.shape, params["up_proj.kernel"].shape[0]
    order = jnp.argsort(chosen.reshape(-1))
    expert = chosen.reshape(-1)[order]
    counts = jnp.diff(jnp.searchsorted(expert, jnp.arange(experts + 1))).astype(jnp.int32)
    # Rows beyond the last group are nobody's; what a grouped product makes of them is open.
    real = (expert < experts)[:, None]

    def product(name: str, rows: jax.Array) -> jax.Array:
        kernel = params[f"{name}.kernel"].astype(rows.dtype)
        y = jax.lax.ragged_dot(rows, kernel, counts, precision=precision)
        bias = params.get(f"{name}.bias")
        return y if bias is None else y + bias.astype(rows.dtype)[expert]

    rows = network(jnp.where(real, x[order // k], 0), product)
    rows = jnp.where(real, rows, 0)[jnp.argsort(order)].reshape(n, k, -1)
    return jnp.einsum("nkd,nk->nd", rows.astype(jnp.float32), weights)


class Blocks(NamedTuple):
    """Rows sorted by expert, each expert's filled up to whole blocks.

    Attributes:
        token: of each place, [p]; choice: which pair of a token and an expert, in [0, n * k).
        real: whether a place is a row and not filling, [p].
        place: of each pair, [n, k]; any place, where no expert was chosen.
        chosen: whether one was, [n, k].
        expert: of each block; used: how many blocks have rows.
    """

    token: Int[Array, " p"]
    choice: Int[Array, " p"]
    real: Bool[Array, " p"]
    place: Int[Array, "n k"]
    chosen: Bool[Array, "n k"]
    expert: Int[Array, " blocks"]
    used: Int[Array, ""]

    @property
    def size(self) -> int:
        """Rows of a block."""
        return self.token.shape[0] // self.expert.shape[0]


def blocks_of(chosen: Int[Array, "n k"], experts: int) -> Blocks:
    """Sort the pairs of tokens and experts; a block holds about the rows of half an expert."""
    n, k = chosen.shape
    size = min(256, max(1, 1 << (n * k // experts).bit_length() - 1)) if n * k > experts else 1
    most = n * k // size + (min(experts, n * k) if size > 1 else 0)
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat)
    bounds = jnp.searchsorted(flat[order], jnp.arange(experts + 1))
    starts, counts = bounds[:-1], jnp.diff(bounds)
    ends = jnp.cumsum(-(-counts // size))
    first = ends - -(-counts // size)
    blocks = jnp.arange(most)
    expert = jnp.minimum(jnp.searchsorted(ends, blocks, side="right"), experts - 1)
    places = jnp.arange(most * size)
    of_place = expert[places // size]
    offset = places - first[of_place] * size
    real = (places // size < ends[-1]) & (offset < counts[of_place])
    choice = order[jnp.where(real, starts[of_place] + offset, 0)]
    of_pair = jnp.minimum(flat, experts - 1)
    place = first[of_pair] * size + jnp.argsort(order) - starts[of_pair]
    place = jnp.clip(place, 0, most * size - 1).reshape(n, k)
    return Blocks(choice // k, choice, real, place, chosen < experts, expert, ends[-1])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def over_blocks(
    network: Network,
    precision: Any,
    x: Float[Array, "n d"],
    weights: Float[Array, "n k"],
    params: Params,
    plan: Blocks,
) -> Float[Array, "n d"]:
    """A loop over the blocks that have rows: no copy of a matrix, no product that is not needed."""
    rows = x[plan.token]

    def step(i: jax.Array, out: jax.Array) -> jax.Array:
        own = jax.tree.map(lambda p: p[plan.expert[i]], params)
        y = network(block_of(rows, i, plan), product_of(own, precision))
        return put_block(out, y, i, plan)

    out = jax.lax.fori_loop(0, plan.used, step, jnp.zeros(rows.shape, x.dtype))
    return jnp.einsum("nkd,nk->nd", out[plan.place].astype(jnp.float32), weights)


def _forward(network, precision, x, weights, params, plan):
    return over_blocks(network, precision, x, weights, params, plan), (x, weights, params, plan)


def _backward(network, precision, kept, g):
    """Each block is computed again, and its gradients added to those of its expert."""
    x, weights, params, plan = kept
    rows, g_rows = x[plan.token], g[plan.token]
    shares = jnp.where(plan.real, weights.reshape(-1)[plan.choice], 0.0)

    def step(i: jax.Array, carry: Any) -> Any:
        dx, dshares, dparams = carry
        e = plan.expert[i]
        own = jax.tree.map(lambda p: p[e], params)
        y, pull = jax.vjp(
            lambda block, own: network(block, product_of(own, precision)),
            block_of(rows, i, plan),
            own,
        )
        g_block = block_of(g_rows, i, plan)
        dblock, down = pull((g_block * block_of(shares, i, plan)[:, None]).astype(y.dtype))
        dshare = jnp.sum(y.astype(jnp.float32) * g_block, axis=-1)
        return (
            put_block(dx, dblock, i, plan),
            put_block(dshares, dshare, i, plan),
            jax.tree.map(lambda total, d: total.at[e].add(d.astype(total.dtype)), dparams, down),
        )

    dparams = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    start = jnp.zeros_like(rows), jnp.zeros(shares.shape, jnp.float32), dparams
    dx, dshares, dparams = jax.lax.fori_loop(0, plan.used, step, start)
    dx = jnp.where(plan.chosen[..., None], dx[plan.place], 0).astype(jnp.float32).sum(axis=1)
    dweights = jnp.where(plan.chosen, dshares[plan.place], 0.0)
    dparams = jax.tree.map(lambda d, p: d.astype(p.dtype), dparams, params)
    return dx.astype(x.dtype), dweights.astype(weights.dtype), dparams, None


over_blocks.defvjp(_forward, _backward)


def block_of(rows: jax.Array, i: jax.Array, plan: Blocks) -> jax.Array:
    """The rows of block `i`."""
    return jax.lax.dynamic_slice_in_dim(rows, i * plan.size, plan.size)


def put_block(rows: jax.Array, block: jax.Array, i: jax.Array, plan: Blocks) -> jax.Array:
    """Write block `i`."""
    return jax.lax.dynamic_update_slice_in_dim(rows, block, i * plan.size, 0)
