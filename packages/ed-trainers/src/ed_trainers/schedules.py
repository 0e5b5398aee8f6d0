"""The learning rate of each step. Pure arithmetic on the step count: nothing to save or restore."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ed_trainers.arguments import TrainingArguments

Schedule = Callable[[jax.typing.ArrayLike], jax.Array]


def build_schedule(arguments: TrainingArguments, total_steps: int) -> Schedule:
    """Make the function from the number of updates already done to the next learning rate.

    The first update uses `learning_rate / warmup_steps`, not zero, and the last one the value just
    above `learning_rate_end`: no step is spent on a learning rate of zero.

    Args:
        arguments: `learning_rate`, `learning_rate_end`, `scheduler`, `warmup_steps`.
        total_steps: updates of the whole run; the decay ends there.

    Returns:
        A function of an integer scalar, traceable, that gives a float32 scalar.
    """
    peak = arguments.learning_rate
    end = arguments.learning_rate_end or 0.0
    warmup = arguments.warmup_steps
    decay_steps = max(total_steps - warmup, 1)

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        count = jnp.asarray(count, jnp.float32)
        done = jnp.clip((count - warmup) / decay_steps, 0.0, 1.0)
        if arguments.scheduler == "linear":
            rate = peak + (end - peak) * done
        elif arguments.scheduler == "cosine":
            rate = end + (peak - end) * 0.5 * (1.0 + jnp.cos(jnp.pi * done))
        else:
            rate = jnp.full_like(done, peak)
        if warmup:
            rate = jnp.where(count < warmup, peak * (count + 1) / warmup, rate)
        return rate

    return schedule
