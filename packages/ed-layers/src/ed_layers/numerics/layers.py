"""Uses of methods that compute experts, and of recurrences.

Legend: b batch, s sequence, d hidden, e experts, r rows, c tokens of a row, h heads, k numbers of a
key, v numbers of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ed_layers.moe.blocks import ExpertParams, Network
from ed_layers.moe.experts import dense
from ed_layers.native.recurrences import Terms
from ed_layers.numerics import Draw, KernelUse, describe_case
from ed_layers.recurrence.rows import Rows, token_by_token

#: Bounds of the sizes of a check: rows and tokens of a recurrence, tokens that choose experts, and
#: experts.
RECURRENCE_ROWS, RECURRENCE_TOKENS, EXPERT_TOKENS, CHECKED_EXPERTS = 2, 128, 64, 16


def describe_experts(
    local: Callable[..., jax.Array],
    network: Network,
    name: str,
    x: jax.Array,
    params: ExpertParams,
    experts_per_token: int,
) -> KernelUse | None:
    """Return the use of a method that computes experts; None for quantized experts.

    Args:
        local: `(x, expert_ids, weights, params) -> out`.
        network: the network of an expert as a function of its products.
        name: name of the method.
        x: [b, s, d].
        params: arrays of the experts.
        experts_per_token: experts of a token.
    """
    if not all(isinstance(array, jax.Array) for array in params.values()):
        return None
    tokens, width = min(x.shape[0] * x.shape[1], EXPERT_TOKENS), x.shape[2]
    experts = min(params["up_proj.kernel"].shape[0], CHECKED_EXPERTS)
    experts_per_token = min(experts_per_token, experts)
    draw_ids = np.random.default_rng(4)
    ids = np.stack([draw_ids.permutation(experts)[:experts_per_token] for _ in range(tokens)])
    shapes = {name: (experts, *array.shape[1:]) for name, array in params.items()}

    def run(x: jax.Array, weights: jax.Array, *arrays: jax.Array) -> jax.Array:
        arguments = dict(zip(shapes, arrays, strict=True))
        return local(x[None], jnp.asarray(ids)[None], weights[None], arguments)[0]

    def reference(x: jax.Array, weights: jax.Array, *arrays: jax.Array) -> jax.Array:
        arguments = dict(zip(shapes, arrays, strict=True))
        return dense(network, None, x, jnp.asarray(ids), weights, arguments)

    def draw_inputs(draw: Draw) -> list[np.ndarray]:
        arrays = [draw.normal(size=size) * size[1] ** -0.5 for size in shapes.values()]
        weights = draw.uniform(0.1, 1, size=(tokens, experts_per_token))
        return [draw.normal(size=(tokens, width)), weights, *arrays]

    inner = params["up_proj.kernel"].shape[2]
    dtype = np.dtype(x.dtype)
    words = describe_case(
        f"{tokens} tokens, {experts_per_token} of {experts}", f"{width} x {inner}", dtype.name
    )
    return KernelUse(f"experts: {name}", words, dtype, run, reference, draw_inputs)


def describe_recurrence(
    rows: Rows,
    step: Callable[..., PyTree],
    state: PyTree,
    inputs: PyTree,
    terms: Callable[[Any], Terms] | None,
) -> KernelUse:
    """Return the use of a recurrence; the reference computes one token after another."""
    leaves, treedef = jax.tree.flatten(inputs)
    weights = _get_bound_arrays(step)
    count = min(RECURRENCE_ROWS, rows.real.shape[0])
    columns = min(RECURRENCE_TOKENS, rows.real.shape[1])
    sizes = [(count, columns, *x.shape[2:]) for x in leaves]
    states = jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype), state)
    dtype = np.dtype(leaves[0].dtype)
    starts = np.zeros((count, columns), bool)
    starts[:, columns // 3] = rows.starts is not None

    def build_rows() -> Rows:
        begins = None if rows.starts is None else jnp.asarray(starts)
        ctx = replace(rows.ctx, ragged=None)
        return Rows(ctx, jnp.ones((count, columns), bool), begins, rows.chunk)

    def zeros() -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), states)

    def fill(arrays: Sequence[jax.Array]) -> tuple[Any, Any, Any]:
        """Return the inputs, and the functions with other weights."""
        arguments = jax.tree.unflatten(treedef, arrays[: len(leaves)])
        extra = arrays[len(leaves) :]
        return arguments, _bind_arrays(step, extra), _bind_arrays(terms, extra)

    def run(*arrays: jax.Array) -> Any:
        arguments, step_now, terms_now = fill(arrays)
        return build_rows().scan(step_now, zeros(), arguments, terms_now)[0]

    def reference(*arrays: jax.Array) -> Any:
        arguments, step_now, terms_now = fill(arrays)
        if terms_now is not None:
            return recur_plainly(terms_now(arguments), starts)
        begun = jnp.cumsum(jnp.asarray(starts), axis=1, dtype=jnp.int32)
        sequential_step = token_by_token(step_now)
        return sequential_step(zeros(), arguments, None if rows.starts is None else begun)[1]

    function = step.func if isinstance(step, partial) else step
    sizes += [weight.shape for weight in weights]
    words = describe_case(
        f"{count} x {columns} tokens",
        " ".join("x".join(map(str, x.shape[2:])) for x in leaves),
        dtype.name,
        several_sequences=rows.starts is not None,
    )
    return KernelUse(
        f"recurrence: {function.__name__}",
        words,
        dtype,
        run,
        reference,
        # Small numbers, so that no state grows.
        lambda draw: [draw.uniform(-0.2, 0.2, size=size) for size in sizes],
    )


def _get_bound_arrays(function: object) -> list[jax.Array]:
    """Return the arrays that a `partial` contains: the weights of a recurrence."""
    arguments = function.args if isinstance(function, partial) else ()
    return [array for array in arguments if isinstance(array, jax.Array)]


def _bind_arrays(function: PyTree, arrays: Sequence[jax.Array]) -> Any:
    """Return a function with other weights."""
    if not isinstance(function, partial):
        return function
    remaining = list(arrays)
    arguments = [remaining.pop(0) if isinstance(x, jax.Array) else x for x in function.args]
    return partial(function.func, *arguments, **function.keywords)


def recur_plainly(terms: Terms, starts: np.ndarray) -> jax.Array:
    """Return the outputs [r, c, h, v] of `ed_layers.native.recurrences`, token by token.

    Args:
        terms: inputs of the recurrence.
        starts: whether a sequence begins at a token, [r, c].
    """
    f64 = jax.tree.map(lambda x: x.astype(jnp.float64), terms)
    repeat = f64.value.shape[2] // f64.key.shape[2]
    query, key = (jnp.repeat(x, repeat, axis=2) for x in (f64.query, f64.key))
    r, _, h, v = f64.value.shape

    def one(state: jax.Array, now: PyTree) -> tuple[jax.Array, jax.Array]:
        q, k, value, decay, beta, start = now
        state = jnp.where(start[:, None, None, None], 0, state)
        if f64.rates is not None:
            factor = jnp.swapaxes(jnp.exp(decay[..., None] * f64.rates), -1, -2)
        else:
            factor = decay[..., None]
        state = state * factor
        if beta is not None:
            value = beta[..., None] * (value - jnp.einsum("rhkv,rhk->rhv", state, k))
        state = state + k[..., None] * value[..., None, :]
        return state, jnp.einsum("rhkv,rhk->rhv", state, q)

    tokens = (query, key, f64.value, f64.decay, f64.beta, jnp.asarray(starts))
    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens)
    state = jnp.zeros((r, h, key.shape[-1], v), jnp.float64)
    return jnp.moveaxis(jax.lax.scan(one, state, tokens)[1], 0, 1)
