"""Recurrences of the native library, one token after another.

A head has a state `S` [k, v]. Token t does

    S = decay[t] S + key[t] value[t]^T,   out[t] = S^T query[t]

and with `beta`, the token writes `beta[t] (value[t] - S^T key[t])` instead of its value. The state
of a head stays in the cache of a core, so a prompt needs fewer microseconds for each token than
products of chunks. The sums of a token do not depend on the other tokens of a call.

Legend: m states, r rows, c columns, h heads, g groups of heads that share queries and keys, k keys,
v values.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ed_layers import fixed_order
from ed_layers.native.library import TARGETS, in_use, on_whole_arrays


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Terms:
    """The inputs of a recurrence; all arrays are float32.

    Attributes:
        query, key: [r, c, g, k].
        value: [r, c, h, v].
        decay: factors of a head, [r, c, h, 1], or of its keys, [r, c, h, k]. With `rates`: step
            sizes [r, c, h, v].
        rates: logarithms of the decay at a step size of 1, [h, v, k].
        beta: [r, c, h].
        keys_last: whether states are [.., v, k]; they then have one decay for a head, or `rates`.
    """

    query: Float[Array, "r c g k"]
    key: Float[Array, "r c g k"]
    value: Float[Array, "r c h v"]
    decay: Float[Array, "r c h _"]
    rates: Float[Array, "h v k"] | None = None
    beta: Float[Array, "r c h"] | None = None
    keys_last: bool = field(default=False, metadata={"static": True})


def takes(*, gradient: bool) -> bool:
    """Return whether `recur` is used: always for sums in one order, otherwise if no gradient is
    needed and every device has whole arrays."""
    return in_use() if fixed_order.active() else not gradient and on_whole_arrays()


def recur(
    terms: Terms,
    states: jax.Array,
    marks: Int[Array, "r c"],
    owner: Int[Array, " r"] | None,
) -> tuple[Float[Array, "r c h v"], jax.Array]:
    """Return the outputs of the tokens, and the states after them. No gradient.

    Args:
        states: m matrices of each head, [m, ..], in any shape.
        marks: 0 = no token: the output is zero, and the state does not change; 1 = a token; 2 = the
            first token of a sequence, which starts with a state of zeros.
        owner: the state that each row reads and writes, one row after another; None = row i has
            state i.
    """
    h, v = terms.value.shape[2:]
    k, groups = terms.key.shape[3], terms.key.shape[2]
    query, key = terms.query, terms.key
    if fixed_order.several_devices() and groups > 1:
        query, key = (jnp.repeat(x, h // groups, axis=2) for x in (query, key))
        groups = h
    matrices = states  # of any shape: XLA would copy reshaped states
    if fixed_order.several_devices():
        matrices = states.reshape(-1, h, *((v, k) if terms.keys_last else (k, v)))
    batch = None if owner is not None else "batch"
    head_axes = (batch, None, "heads", None)
    group_axes = (batch, None, None if groups == 1 else "heads", None)
    arrays = {
        "states": (matrices, (batch, "heads", *(None,) * (matrices.ndim - 2))),
        "marks": (marks, (batch, None)),
        "query": (query, group_axes),
        "key": (key, group_axes),
        "value": (terms.value, head_axes),
        "decay": (terms.decay, head_axes),
        "rates": (terms.rates, ("heads", None, None)),
        "beta": (terms.beta, head_axes[:3]),
    }

    def part(matrices: jax.Array, marks: jax.Array, *inputs: jax.Array) -> list[jax.Array]:
        state_indices = jnp.arange(len(marks)) if owner is None else owner
        shapes = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (matrices, inputs[2])]
        call = jax.ffi.ffi_call(
            TARGETS["ed_recurrence"],
            shapes,
            vmap_method="sequential",
            input_output_aliases={0: 0},
        )
        new_states, out = call(
            matrices, state_indices.astype(jnp.int32), marks, *inputs, keys_last=terms.keys_last
        )
        return [out, new_states]

    for name in ("rates", "beta"):
        if arrays[name][0] is None:
            arrays[name] = jnp.zeros((0, 0, 0), jnp.float32), (None,) * 3
    out, new_states = fixed_order.run_on_shards(
        part,
        [x for x, _ in arrays.values()],
        [axes for _, axes in arrays.values()],
        [(head_axes, terms.value.shape), (arrays["states"][1], matrices.shape)],
    )
    return out, new_states.reshape(states.shape)
