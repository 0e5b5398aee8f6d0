"""Schedule-free learning: averaging instead of a schedule (Defazio et al. 2024, 2405.15682).

There are three sequences. The optimizer updates z, x is the average of z, and gradients are
computed at y = (1 - b1) z + b1 x. The parameters of a state are x, so evaluations, checkpoints
and rollouts always use the average. z is part of the optimizer's state, and
`gradient_point` returns y.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from ed_trainers.optimizers.masters import find_state, with_float32
from ed_trainers.optimizers.per_array import create_transformation
from ed_trainers.optimizers.schedules import Schedule

P = TypeVar("P")


class ScheduleFreeState(NamedTuple):
    """State of `schedule_free`.

    Attributes:
        count: updates done.
        b1: share of the average in y.
        largest: highest learning rate so far.
        weights: sum of the weights of the average.
        z: the sequence that the optimizer updates, a tree like the parameters.
        inner: state of the optimizer that makes them.
    """

    count: jax.Array
    b1: jax.Array
    largest: jax.Array
    weights: jax.Array
    z: optax.Params
    inner: optax.OptState


def schedule_free(
    inner: optax.GradientTransformation, schedule: Schedule, *, b1: float, weight_lr_power: float
) -> optax.GradientTransformation:
    """Average the steps of an optimizer that has no momentum.

    Args:
        inner: computes the update of z from the gradient at y, with y as its parameters.
        schedule: its learning rate: an iterate counts by the highest one so far.
        b1: share of the average in y.
        weight_lr_power: power of the learning rate that is its weight.
    """

    def init(params: optax.Params) -> ScheduleFreeState:
        zero = jnp.zeros((), jnp.float32)
        z = jax.tree.map(jnp.copy, params)
        share = jnp.asarray(b1, jnp.float32)
        return ScheduleFreeState(jnp.zeros((), jnp.int32), share, zero, zero, z, inner.init(params))

    def update(
        updates: optax.Updates, state: ScheduleFreeState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScheduleFreeState]:
        x = params
        largest = jnp.maximum(state.largest, schedule(state.count))
        weight = largest**weight_lr_power
        weights = state.weights + weight
        share = weight / jnp.maximum(weights, jnp.finfo(jnp.float32).tiny)
        point = _between(b1, state.z, x)
        steps, inner_state = inner.update(updates, state.inner, point)
        z = jax.tree.map(lambda z, step: z + step, state.z, steps)
        moved = jax.tree.map(lambda z, x: share * (z - x), z, x)
        new = ScheduleFreeState(state.count + 1, state.b1, largest, weights, z, inner_state)
        return moved, new

    return create_transformation(init, update)


def gradient_point(params: P, opt_state: optax.OptState | None) -> P:
    """Return the parameters at which the next gradient is to be taken, in their dtypes.

    They are the parameters themselves for every optimizer but schedule-free ones.
    """
    if opt_state is None:
        return params
    state = find_state(opt_state, ScheduleFreeState)
    if state is None:
        return params
    point = _between(state.b1, state.z, with_float32(params, opt_state))
    return jax.tree.map(lambda y, p: y.astype(p.dtype), point, params)


def _between(b1: jax.typing.ArrayLike, z: optax.Params, x: object) -> optax.Params:
    return jax.tree.map(lambda z, x: (1.0 - b1) * z + b1 * x, z, x)
