"""Learning rate by step: warm-up, then a schedule."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from ed_infra.options import Options

from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.optimizers import (
    DecaySettings,
    PolynomialSettings,
    WSDSettings,
    scheduler_settings,
)

Schedule = Callable[[jax.typing.ArrayLike], jax.Array]


def build_schedule(arguments: TrainingArguments, total_steps: int) -> Schedule:
    """Make the function from the number of updates already done to the next learning rate.

    The first update uses `learning_rate / warmup_steps`, not zero, and the last one the value just
    above `learning_rate_end`: no step is spent on a learning rate of zero.

    Args:
        arguments: `learning_rate`, `learning_rate_end`, `scheduler`, `scheduler_kwargs`,
            `warmup_steps`, `warmup_ratio`.
        total_steps: updates of the whole run; the decay ends there, or at `decay_steps`.

    Returns:
        A traceable function from an integer scalar to a float32 scalar.
    """
    peak = arguments.learning_rate
    end = arguments.learning_rate_end or 0.0
    settings = scheduler_settings(arguments.scheduler, arguments.scheduler_kwargs)
    warmup = arguments.count_warmup_steps(total_steps)
    if isinstance(settings, DecaySettings):
        total_steps = settings.decay_steps or total_steps
    begin, course = _course(settings, arguments.scheduler, warmup, total_steps)

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        count = jnp.asarray(count, jnp.float32)
        done = jnp.clip((count - begin) / max(total_steps - begin, 1), 0.0, 1.0)
        rate = end + (peak - end) * course(done)
        if warmup:
            rate = jnp.where(count < warmup, peak * (count + 1) / warmup, rate)
        return rate

    return schedule


def _course(
    settings: Options, scheduler: str, begin: int, total_steps: int
) -> tuple[int, Callable[[jax.Array], jax.Array]]:
    """Return the first step of the decay, and its factor (1 to 0) by the completed share."""
    match settings:
        case PolynomialSettings():
            return begin, lambda done: (1.0 - done) ** settings.power
        case WSDSettings():
            steps = settings.num_decay_steps or max(round(total_steps / 10), 1)
            return max(total_steps - steps, begin), _DECAYS[settings.decay_type]
    return begin, _DECAYS.get(scheduler, jnp.ones_like)


_DECAYS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + jnp.cos(jnp.pi * done)),
    "1-sqrt": lambda done: 1.0 - jnp.sqrt(done),
}
