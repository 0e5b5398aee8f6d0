"""A running mean of the parameters, often with a lower loss than the parameters (Polyak)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from ed_trainers.optimizers.masters import find_state
from ed_trainers.optimizers.per_array import create_transformation


class EmaState(NamedTuple):
    """State of `with_ema`.

    Attributes:
        ema: the mean of each parameter, float32.
        inner: state of the optimizer.
    """

    ema: optax.Params
    inner: optax.OptState


def with_ema(inner: optax.GradientTransformation, decay: float) -> optax.GradientTransformation:
    """Keep `ema = decay * ema + (1 - decay) * parameters`, from the parameters after each update.

    The mean begins as the parameters that training begins with.
    """

    def init(params: optax.Params) -> EmaState:
        # Copied: a step donates the parameters, and a buffer can be donated once.
        mean = jax.tree.map(lambda p: jnp.copy(p).astype(jnp.float32), params)
        return EmaState(mean, inner.init(params))

    def update(
        updates: optax.Updates, state: EmaState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, EmaState]:
        updates, inner_state = inner.update(updates, state.inner, params)

        def mean(old: jax.Array, param: jax.Array, change: jax.Array) -> jax.Array:
            return decay * old + (1.0 - decay) * (param + change).astype(jnp.float32)

        return updates, EmaState(jax.tree.map(mean, state.ema, params, updates), inner_state)

    return create_transformation(init, update)


def get_ema_params(params: optax.Params, opt_state: optax.OptState) -> optax.Params:
    """Return the mean of the parameters in their dtypes, or the parameters if no mean is kept."""
    state = find_state(opt_state, EmaState)
    if state is None:
        return params
    # Copied, as above: the next training step donates both.
    return jax.tree.map(lambda mean, p: jnp.copy(mean).astype(p.dtype), state.ema, params)
