"""Experts as a loop over blocks of rows that share one expert.

The loop multiplies no row that is not needed, and copies no matrix.

Legend: n tokens, k experts of a token, e experts, d hidden, p places (rows, padded to whole
blocks).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike
from jaxtyping import Array, Bool, Float, Int, PyTree

from ed_layers.fixed_order import KernelChoice
from ed_layers.projections.dot import dot
from ed_layers.sums import compute_weighted_sum


@runtime_checkable
class Matrices(Protocol):
    """Matrices [e, i, o] of experts that are not a plain array (quantized): a pytree."""

    #: Whether the matrices need a gradient.
    learns: ClassVar[bool]

    @property
    def shape(self) -> tuple[int, ...]:
        """(e, i, o)."""
        ...

    @property
    def pieces(self) -> tuple[int, ...]:
        """For each dimension, the number of parts that the matrices can be split into."""
        ...

    def product(self, x: jax.Array, *, precision: PrecisionLike = None) -> jax.Array:
        """Return `x @ self` of one expert's matrix, [..., o], in the dtype of `x`."""
        ...

    def grouped_product(
        self, rows: jax.Array, counts: jax.Array, *, precision: PrecisionLike = None
    ) -> jax.Array:
        """Multiply the first `counts[0]` rows by the first matrix, and so on, as `ragged_dot`."""
        ...


#: The arrays of all experts, or of one: "up_proj.kernel", "up_proj.bias" and so on; for an adapter
#: "up_proj.lora_a" and "up_proj.lora_b", which contains the scale. A quantized kernel is a pytree.
ExpertParams = Mapping[str, jax.Array | Matrices]
#: `(name of a layer, x) -> y`: multiplies the rows of `x` by the matrices of their experts.
ExpertProduct = Callable[[str, jax.Array], jax.Array]
#: A feed-forward network as a function of its products.
Network = Callable[[jax.Array, ExpertProduct], jax.Array]


def build_product(params: ExpertParams, precision: PrecisionLike) -> ExpertProduct:
    """Return the layers of one expert."""

    def product(name: str, x: jax.Array) -> jax.Array:
        y = times(x, f"{name}.kernel")
        if f"{name}.lora_a" in params:
            y = y + times(times(x, f"{name}.lora_a"), f"{name}.lora_b")
        bias = params.get(f"{name}.bias")
        return y if bias is None else y + require_array(bias).astype(x.dtype)

    def times(x: jax.Array, name: str) -> jax.Array:
        return dot(x, params[name], precision=precision)

    return product


def require_array(array: jax.Array | Matrices) -> jax.Array:
    """Return an array that is never quantized."""
    assert isinstance(array, jax.Array)
    return array


def split_learned(params: ExpertParams) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the parameters into those with gradients and those without."""
    learned = {n: v for n, v in params.items() if isinstance(v, jax.Array) or v.learns}
    return learned, {name: v for name, v in params.items() if name not in learned}


class ExpertBlocks(NamedTuple):
    """Rows sorted by expert; the rows of each expert are padded to whole blocks.

    Attributes:
        token: token of each place, [p].
        choice: pair of a token and an expert of each place, in [0, n * k), [p].
        real: whether a place holds a row and not padding, [p].
        place: place of each pair, [n, k]; arbitrary where no expert was chosen.
        has_expert: whether an expert was chosen, [n, k].
        expert: expert of each block.
        used: number of blocks that hold rows.
    """

    token: Int[Array, " p"]
    choice: Int[Array, " p"]
    real: Bool[Array, " p"]
    place: Int[Array, "n k"]
    has_expert: Bool[Array, "n k"]
    expert: Int[Array, " blocks"]
    used: Int[Array, ""]

    @property
    def size(self) -> int:
        """Number of rows in a block."""
        return self.token.shape[0] // self.expert.shape[0]


def build_blocks(expert_ids: Int[Array, "n k"], experts: int) -> ExpertBlocks:
    """Sort the pairs by expert; a block holds about half of the rows of one expert."""
    n, k = expert_ids.shape
    size = min(256, max(1, 1 << (n * k // experts).bit_length() - 1)) if n * k > experts else 1
    most = n * k // size + (min(experts, n * k) if size > 1 else 0)
    flat = expert_ids.reshape(-1)
    order = jnp.argsort(flat)
    bounds = jnp.searchsorted(flat[order], jnp.arange(experts + 1))
    starts, counts = bounds[:-1], jnp.diff(bounds)
    ends = jnp.cumsum(-(-counts // size))
    first = ends - -(-counts // size)
    blocks = jnp.arange(most)
    expert = jnp.minimum(jnp.searchsorted(ends, blocks, side="right"), experts - 1)
    places = jnp.arange(most * size)
    place_experts = expert[places // size]
    offset = places - first[place_experts] * size
    real = (places // size < ends[-1]) & (offset < counts[place_experts])
    choice = order[jnp.where(real, starts[place_experts] + offset, 0)]
    pair_experts = jnp.minimum(flat, experts - 1)
    place = first[pair_experts] * size + jnp.argsort(order) - starts[pair_experts]
    place = jnp.clip(place, 0, most * size - 1).reshape(n, k)
    return ExpertBlocks(choice // k, choice, real, place, expert_ids < experts, expert, ends[-1])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def over_expert_blocks(
    network: Network,
    precision: PrecisionLike,
    choice: KernelChoice,
    x: Float[Array, "n d"],
    weights: Float[Array, "n k"],
    params: ExpertParams,
    plan: ExpertBlocks,
) -> Float[Array, "n d"]:
    """Loop over the blocks that hold rows, without copying a matrix."""

    def run(x: jax.Array, weights: jax.Array, params: ExpertParams, plan: ExpertBlocks):
        rows = x[plan.token]

        def step(i: jax.Array, out: jax.Array) -> jax.Array:
            expert_params = jax.tree.map(lambda p: p[plan.expert[i]], params)
            y = network(get_block(rows, i, plan), build_product(expert_params, precision))
            return put_block(out, y, i, plan)

        out = jax.lax.fori_loop(0, plan.used, step, jnp.zeros(rows.shape, x.dtype))
        return compute_weighted_sum(out[plan.place], weights)

    return choice.wrap_function(run)(x, weights, params, plan)


def _forward(network, precision, choice, x, weights, params, plan):
    out = over_expert_blocks(network, precision, choice, x, weights, params, plan)
    return out, (x, weights, params, plan)


def _backward(network, precision, choice, residuals, g):
    """Recompute each block and add its gradients to the gradients of its expert."""
    x, weights, params, plan = residuals
    learned, frozen = split_learned(params)
    rows, g_rows = x[plan.token], g[plan.token]
    shares = jnp.where(plan.real, weights.reshape(-1)[plan.choice], 0.0)

    def step(
        i: jax.Array, carry: tuple[jax.Array, jax.Array, PyTree]
    ) -> tuple[jax.Array, jax.Array, PyTree]:
        dx, dshares, dparams = carry
        e = plan.expert[i]
        learned_params, frozen_params = jax.tree.map(lambda p: p[e], (learned, frozen))
        y, pull = jax.vjp(
            lambda block, learned_params: network(
                block, build_product({**learned_params, **frozen_params}, precision)
            ),
            get_block(rows, i, plan),
            learned_params,
        )
        g_block = get_block(g_rows, i, plan)
        dblock, down = pull((g_block * get_block(shares, i, plan)[:, None]).astype(y.dtype))
        dshare = jnp.sum(y.astype(jnp.float32) * g_block, axis=-1)
        return (
            put_block(dx, dblock, i, plan),
            put_block(dshares, dshare, i, plan),
            jax.tree.map(lambda total, d: total.at[e].add(d.astype(total.dtype)), dparams, down),
        )

    dparams = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), learned)
    start = jnp.zeros_like(rows), jnp.zeros(shares.shape, jnp.float32), dparams
    with choice.restore():
        dx, dshares, dparams = jax.lax.fori_loop(0, plan.used, step, start)
    dx = jnp.where(plan.has_expert[..., None], dx[plan.place], 0).astype(jnp.float32).sum(axis=1)
    dweights = jnp.where(plan.has_expert, dshares[plan.place], 0.0)
    dparams = jax.tree.map(lambda d, p: d.astype(p.dtype), dparams, learned)
    dparams |= dict.fromkeys(frozen)
    return dx.astype(x.dtype), dweights.astype(weights.dtype), dparams, None


over_expert_blocks.defvjp(_forward, _backward)


def get_block(rows: jax.Array, i: jax.Array, plan: ExpertBlocks) -> jax.Array:
    """Return the rows of block `i`."""
    return jax.lax.dynamic_slice_in_dim(rows, i * plan.size, plan.size)


def put_block(rows: jax.Array, block: jax.Array, i: jax.Array, plan: ExpertBlocks) -> jax.Array:
    """Write block `i`."""
    return jax.lax.dynamic_update_slice_in_dim(rows, block, i * plan.size, 0)
