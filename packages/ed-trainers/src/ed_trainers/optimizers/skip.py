"""Steps that are skipped: a loss or a gradient that is not finite, or far above those before.

The rule is that of OLMo's `SkipStepOptimizer`: a spike is `sigma_factor` standard deviations above
the mean of the last `rolling_interval_length` steps, in the loss or in the gradient's norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from ed_trainers.optimizers.masters import find_state


class SkipState(NamedTuple):
    """State of `skip_bad_steps`.

    Attributes:
        losses, norms: of the latest steps whose figures were finite, [interval] float32.
        recorded: how many such steps there were.
        skipped: whether the last step was skipped.
        inner: state of the optimizer.
    """

    losses: jax.Array
    norms: jax.Array
    recorded: jax.Array
    skipped: jax.Array
    inner: optax.OptState


def skip_bad_steps(
    inner: optax.GradientTransformation,
    *,
    interval: int,
    sigma: float | None,
    norm: Callable[[optax.Updates], jax.Array],
) -> optax.GradientTransformationExtraArgs:
    """Skip bad steps: they change neither the parameters nor the state of the optimizer.

    Args:
        inner: the optimizer.
        interval: number of steps that a loss is compared with; no loss is a spike before half of
            these steps are done.
        sigma: number of standard deviations above the mean from which a loss is a spike; None
            skips only steps that are not finite.
        norm: returns the norm of a gradient.

    Returns:
        A transformation whose update receives the loss as `value=`.
    """

    def init(params: optax.Params) -> SkipState:
        # Two arrays: a step donates its state, and a buffer can be donated once.
        losses, norms = (jnp.zeros((interval,), jnp.float32) for _ in range(2))
        recorded = jnp.zeros((), jnp.int32)
        return SkipState(losses, norms, recorded, jnp.zeros((), bool), inner.init(params))

    def update(
        updates: optax.Updates,
        state: SkipState,
        params: optax.Params | None = None,
        *,
        value: jax.Array,
        **_: object,
    ) -> tuple[optax.Updates, SkipState]:
        figures = (jnp.asarray(value, jnp.float32), norm(updates))
        finite = jnp.isfinite(figures[0]) & jnp.isfinite(figures[1])
        histories = (state.losses, state.norms)
        good = finite
        if sigma is not None:
            judged = state.recorded >= max(2, interval // 2)
            pairs = zip(figures, histories, strict=True)
            spikes = [_is_spike(x, history, state.recorded, sigma) for x, history in pairs]
            good = finite & ~(judged & (spikes[0] | spikes[1]))
        at = state.recorded % interval
        losses, norms = (
            jnp.where(finite, xs.at[at].set(x), xs)
            for x, xs in zip(figures, histories, strict=True)
        )
        new, inner_state = inner.update(updates, state.inner, params)
        new = jax.tree.map(lambda u: jnp.where(good, u, jnp.zeros_like(u)), new)
        inner_state = jax.tree.map(lambda n, o: jnp.where(good, n, o), inner_state, state.inner)
        return new, SkipState(losses, norms, state.recorded + finite, ~good, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]


def was_skipped(opt_state: optax.OptState | None) -> jax.Array | None:
    """Return whether the last step was skipped, a scalar; None if steps are never skipped."""
    state = None if opt_state is None else find_state(opt_state, SkipState)
    return None if state is None else state.skipped


def _is_spike(x: jax.Array, history: jax.Array, recorded: jax.Array, sigma: float) -> jax.Array:
    real = jnp.arange(history.shape[0]) < recorded
    count = jnp.maximum(jnp.sum(real), 2)
    mean = jnp.sum(jnp.where(real, history, 0.0)) / count
    variance = jnp.sum(jnp.where(real, jnp.square(history - mean), 0.0)) / (count - 1)
    return x - mean > sigma * jnp.sqrt(variance)
