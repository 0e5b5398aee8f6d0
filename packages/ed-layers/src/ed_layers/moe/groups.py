"""Experts as grouped products of rows that are sorted by expert.

Legend: n tokens, k experts of a token, e experts, d hidden, r rows: pairs of a token and an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike
from jaxtyping import Array, Float, Int, PyTree

from ed_layers.moe.blocks import ExpertParams, Matrices, Network, require_array, split_learned


def over_groups(
    network: Network,
    precision: PrecisionLike,
    x: Float[Array, "n d"],
    expert_ids: Int[Array, "n k"],
    weights: Float[Array, "n k"],
    params: ExpertParams,
    share: int = 1,
) -> Float[Array, "n d"]:
    """Compute each layer as one grouped product over the rows of the local experts.

    Args:
        share: the tokens choose from `share` times as many experts as this device holds. With an
            even choice, 1 / share of the rows are local. The rows are computed in parts of that
            length, because the time of a grouped product includes rows that belong to no group.
    """
    (n, k), experts = expert_ids.shape, params["up_proj.kernel"].shape[0]
    order = jnp.argsort(expert_ids.reshape(-1))
    # A search by halves is a loop with four launches in each iteration on a GPU.
    bounds = jnp.searchsorted(
        expert_ids.reshape(-1)[order], jnp.arange(experts + 1), method="compare_all"
    ).astype(jnp.int32)
    if share == 1:
        rows = apply_experts(network, precision, x[order // k], params, bounds)
        places = (
            jnp.zeros(n * k, order.dtype)
            .at[order]
            .set(jnp.arange(n * k, dtype=order.dtype), unique_indices=True)
        )
        rows = rows[places].reshape(n, k, -1)
        return jnp.einsum("nkd,nk->nd", rows.astype(jnp.float32), weights)
    size = -(-n * k // share)
    order = jnp.pad(order, (0, -n * k % size))
    learned, frozen = split_learned(params)
    part = partial(one_part, network, precision, size)
    return sum_parts(part, (x, weights, learned), (order, bounds, frozen), -(-bounds[-1] // size))


def apply_experts(
    network: Network,
    precision: PrecisionLike,
    rows: Float[Array, "r d"],
    params: ExpertParams,
    bounds: Int[Array, " bounds"],
) -> Float[Array, "r d"]:
    """Apply the experts to their rows; those of expert i start at `bounds[i]`. The rest is zero."""
    counts, places = jnp.diff(bounds), jnp.arange(rows.shape[0])
    real = (places < bounds[-1])[:, None]
    expert = jnp.searchsorted(bounds[1:-1], places, side="right", method="compare_all")

    def product(name: str, rows: jax.Array) -> jax.Array:
        y = times(rows, f"{name}.kernel")
        if f"{name}.lora_a" in params:
            y = y + times(times(rows, f"{name}.lora_a"), f"{name}.lora_b")
        bias = params.get(f"{name}.bias")
        return y if bias is None else y + require_array(bias).astype(rows.dtype)[expert]

    def times(rows: jax.Array, name: str) -> jax.Array:
        kernel = params[name]
        if isinstance(kernel, Matrices):
            return kernel.grouped_product(rows, counts, precision=precision)
        kernel = require_array(kernel).astype(rows.dtype)
        return jax.lax.ragged_dot(rows, kernel, counts, precision=precision)

    # A grouped product leaves the rows that belong to no group undefined.
    return jnp.where(real, network(jnp.where(real, rows, 0), product), 0)


def one_part(
    network: Network,
    precision: PrecisionLike,
    size: int,
    i: Int[Array, ""],
    operands: tuple[jax.Array, jax.Array, dict[str, jax.Array]],
    plan: tuple[jax.Array, jax.Array, ExpertParams],
) -> Float[Array, "n d"]:
    """Return the contribution of the rows from `i * size` to `(i + 1) * size` to the output."""
    (x, weights, learned), (order, bounds, frozen) = operands, plan
    params = {**learned, **frozen}
    pair = jax.lax.dynamic_slice_in_dim(order, i * size, size)
    token = pair // weights.shape[1]
    rows = apply_experts(network, precision, x[token], params, jnp.clip(bounds - i * size, 0, size))
    rows = rows.astype(jnp.float32) * weights.reshape(-1)[pair][:, None]
    return jnp.zeros(x.shape, jnp.float32).at[token].add(rows)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_parts(
    part: Callable[..., jax.Array], operands: PyTree, plan: PyTree, count: Int[Array, ""]
) -> jax.Array:
    """Return `sum(part(i, operands, plan) for i in range(count))` for a traced `count`.

    The backward pass recomputes each part.
    """
    total = jax.eval_shape(part, count, operands, plan)
    start = jnp.zeros(total.shape, total.dtype)
    return jax.lax.fori_loop(0, count, lambda i, sum: sum + part(i, operands, plan), start)


def _forward(part, operands, plan, count):
    return sum_parts(part, operands, plan, count), (operands, plan, count)


def _backward(part, residuals, g):
    operands, plan, count = residuals

    def step(i: jax.Array, totals: PyTree) -> PyTree:
        pull = jax.vjp(lambda operands: part(i, operands, plan), operands)[1]
        return jax.tree.map(lambda total, d: total + d.astype(total.dtype), totals, pull(g)[0])

    start = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), operands)
    totals = jax.lax.fori_loop(0, count, step, start)
    return jax.tree.map(lambda d, x: d.astype(x.dtype), totals, operands), None, None


sum_parts.defvjp(_forward, _backward)
