"""Float32 masters of parameters that are stored below float32."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from ed_trainers.optimizers.per_array import create_transformation

S = TypeVar("S")
P = TypeVar("P")


class MasterState(NamedTuple):
    """State of `with_masters`.

    Attributes:
        masters: float32 copies; `optax.MaskedNode` where the parameter itself is float32.
        inner: state of the optimizer that updates them.
    """

    masters: optax.Params
    inner: optax.OptState


def find_state(opt_state: optax.OptState, kind: type[S]) -> S | None:
    """Return the part of an optimizer's state with the given class, or None."""
    parts = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, kind))
    return next((part for part in parts if isinstance(part, kind)), None)


def with_masters(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Run an optimizer on float32 copies of the parameters that are stored below float32.

    The updates that come out are float32; `apply_updates` turns the new masters into the new
    parameters. Without such parameters the state is that of `inner` behind an empty tuple.
    """

    def init(params: optax.Params) -> MasterState:
        masters = jax.tree.map(
            lambda p: p.astype(jnp.float32) if _is_low(p) else optax.MaskedNode(), params
        )
        return MasterState(masters, inner.init(_merge_masters(masters, params)))

    def update(
        updates: optax.Updates, state: MasterState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, MasterState]:
        updates = jax.tree.map(lambda u: u.astype(jnp.float32), updates)
        updates, inner_state = inner.update(
            updates, state.inner, _merge_masters(state.masters, params)
        )
        masters = jax.tree.map(
            lambda m, u: m if _is_masked(m) else m + u, state.masters, updates, is_leaf=_is_masked
        )
        return updates, MasterState(masters, inner_state)

    return create_transformation(init, update)


def in_parameter_dtype(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Preserve the dtypes that `init` chose: float32 gradients would widen the moments."""

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        updates = jax.tree.map(lambda u, p: u.astype(p.dtype), updates, params)
        updates, new = inner.update(updates, state, params)
        return updates, jax.tree.map(lambda n, o: n.astype(o.dtype), new, state)

    return optax.GradientTransformation(inner.init, update)


def with_float32(params: P, opt_state: optax.OptState) -> P:
    """Return the parameters; those with a master are replaced by it."""
    state = find_state(opt_state, MasterState)
    return params if state is None else _merge_masters(state.masters, params)


def apply_updates(
    params: optax.Params, updates: optax.Updates, opt_state: optax.OptState
) -> optax.Params:
    """Add the updates; a parameter that has a master becomes that master, rounded once.

    Args:
        params: the parameters before the step.
        updates: the updates that the optimizer returned.
        opt_state: the optimizer's state *after* the step.
    """
    state = find_state(opt_state, MasterState)
    if state is None:
        return optax.apply_updates(params, updates)

    def new(master: jax.Array, param: jax.Array, update: jax.Array) -> jax.Array:
        return (param + update if _is_masked(master) else master).astype(param.dtype)

    return jax.tree.map(new, state.masters, params, updates, is_leaf=_is_masked)


def _merge_masters(masters: optax.Params, params: P) -> P:
    return jax.tree.map(lambda m, p: p if _is_masked(m) else m, masters, params, is_leaf=_is_masked)


def _is_low(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating) and jnp.finfo(leaf.dtype).bits < 32


def _is_masked(leaf: object) -> bool:
    return isinstance(leaf, optax.MaskedNode)
