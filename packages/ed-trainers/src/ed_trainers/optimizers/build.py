"""The optimizer of a run, in one chain: direction, rules, float32 masters, clipping, skipping."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ed_trainers.optimizers.eight_bit import SMALLEST, eight_bit
from ed_trainers.optimizers.ema import with_ema
from ed_trainers.optimizers.groups import ParamTree, learning_rate_factors, weight_decays
from ed_trainers.optimizers.kron import scale_by_kron
from ed_trainers.optimizers.mars import scale_by_mars
from ed_trainers.optimizers.masters import in_parameter_dtype, with_masters
from ed_trainers.optimizers.muon import matrices, scale_by_muon
from ed_trainers.optimizers.per_array import create_transformation, own_shapes, per_array
from ed_trainers.optimizers.schedule_free import ScheduleFreeState, schedule_free
from ed_trainers.optimizers.schedules import Schedule
from ed_trainers.optimizers.skip import skip_bad_steps
from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.optimizers import (
    KronSettings,
    MarsSettings,
    MuonSettings,
    QuadSettings,
    ScheduleFreeAdamWSettings,
    SkewSettings,
    optimizer_settings,
)

Direction = optax.GradientTransformation
NumbersOf = Callable[[optax.Params | None], ParamTree]


def build_optimizer(
    arguments: TrainingArguments, schedule: Schedule
) -> optax.GradientTransformation:
    """Return the gradient transformation that the arguments describe.

    Gradients may come in any float dtype. The structure of the state depends on `optimizer`,
    `skip_bad_steps`, whether there is an `ema_decay`, and the dtypes of the parameters alone, so a
    resumed run may change every other setting. With `skip_bad_steps`, the update also needs the
    loss, as `value=`.
    """
    settings = optimizer_settings(arguments.optimizer, arguments.optimizer_kwargs)
    core = optax.chain(
        DIRECTIONS[arguments.optimizer](settings.model_dump(), arguments.tx_mu_dtype),
        _add_decay(partial(weight_decays, arguments)),
        _by_learning_rate(schedule, partial(_factors, arguments)),
    )
    if isinstance(settings, ScheduleFreeAdamWSettings):
        power = settings.weight_lr_power
        core = schedule_free(core, schedule, b1=settings.b1, weight_lr_power=power)
    if arguments.ema_decay is not None:
        core = with_ema(core, arguments.ema_decay)
    core = with_masters(core) if arguments.master_dtype else in_parameter_dtype(core)
    if arguments.clip_grad is not None:
        core = _clip_by_norm(core, arguments.clip_grad)
    if not arguments.skip_bad_steps:
        return core
    interval, sigma = arguments.rolling_interval_length, arguments.sigma_factor
    return skip_bad_steps(core, interval=interval, sigma=sigma, norm=global_norm)


def check_rules(arguments: TrainingArguments, params: optax.Params) -> None:
    """Look up every rule that the optimizer uses, before training begins.

    Raises:
        ConfigError: a rule matches no parameter.
    """
    weight_decays(arguments, params)
    learning_rate_factors(arguments, params)


def global_norm(tree: optax.Updates) -> jax.Array:
    """Return the Euclidean norm over all leaves, accumulated in float32."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))


# --- directions: the update of an optimizer before weight decay and learning rate ---


def _adamw(settings: dict[str, Any], mu_dtype: str | None) -> Direction:
    return optax.scale_by_adam(**settings, mu_dtype=mu_dtype)


def _lion(settings: dict[str, Any], mu_dtype: str | None) -> Direction:
    return optax.scale_by_lion(**settings, mu_dtype=mu_dtype)


def _eight_bit(
    scale: Callable[..., Direction], settings: dict[str, Any], mu_dtype: str | None
) -> Direction:
    """Store the moments of large arrays in eight bits, those of small arrays as usual."""
    block_size = settings.pop("block_size")
    inner = scale(**settings, mu_dtype=mu_dtype)
    large = per_array(eight_bit(inner, block_size=block_size))
    return _split(large, inner, lambda params: _map_shapes(lambda p: p.size >= SMALLEST, params))


def _adafactor(settings: dict[str, Any], mu_dtype: str | None) -> Direction:
    del mu_dtype
    return per_array(optax.chain(optax.adafactor(None, **settings), optax.scale(-1.0)))


def _rmsprop(settings: dict[str, Any], mu_dtype: str | None) -> Direction:
    del mu_dtype
    # eps outside the root, as torch has it: optax's default is inside.
    scale = optax.scale_by_rms(decay=settings["decay"], eps=settings["eps"], eps_in_sqrt=False)
    return optax.chain(scale, _trace(settings["momentum"]))


def _sgd(settings: dict[str, Any], mu_dtype: str | None) -> Direction:
    del mu_dtype
    return _trace(settings["momentum"], nesterov=settings["nesterov"])


def _trace(momentum: float | None, *, nesterov: bool = False) -> Direction:
    return optax.identity() if momentum is None else optax.trace(momentum, nesterov)


def _muon(settings: dict[str, Any], mu_dtype: str | None) -> Direction:
    muon_settings = MuonSettings(**settings)
    adam = optax.scale_by_adam(
        muon_settings.adam_b1, muon_settings.adam_b2, muon_settings.adam_eps, mu_dtype=mu_dtype
    )
    return _split(per_array(scale_by_muon(muon_settings)), adam, matrices)


def _mars(settings: dict[str, Any], mu_dtype: str | None) -> Direction:
    mars_settings = MarsSettings(**settings)
    adam = optax.scale_by_adam(
        mars_settings.adam_b1, mars_settings.adam_b2, mars_settings.adam_eps, mu_dtype=mu_dtype
    )
    return _split(
        per_array(scale_by_mars(mars_settings)),
        adam,
        lambda params: _map_shapes(lambda array: len(array.shape) == 2, params),
    )


def _kron(kind: type[KronSettings], settings: dict[str, Any], mu_dtype: str | None) -> Direction:
    del mu_dtype
    return per_array(scale_by_kron(kind(**settings)))


def _schedule_free_adamw(settings: dict[str, Any], mu_dtype: str | None) -> Direction:
    del mu_dtype
    return optax.scale_by_rms(
        decay=settings["b2"], eps=settings["eps"], eps_in_sqrt=False, bias_correction=True
    )


DIRECTIONS: dict[str, Callable[[dict[str, Any], str | None], Direction]] = {
    "adamw": _adamw,
    "adamw_8bit": partial(_eight_bit, optax.scale_by_adam),
    "lion": _lion,
    "lion_8bit": partial(_eight_bit, optax.scale_by_lion),
    "adafactor": _adafactor,
    "muon": _muon,
    "rmsprop": _rmsprop,
    "sgd": _sgd,
    "mars": _mars,
    "quad": partial(_kron, QuadSettings),
    "skew": partial(_kron, SkewSettings),
    "schedule_free_adamw": _schedule_free_adamw,
}


def _split(
    first: Direction, second: Direction, chooses: Callable[[optax.Params], Any]
) -> optax.GradientTransformation:
    """Apply one transformation to the selected parameters and another to all others."""

    def labels(params: optax.Params) -> Any:
        return jax.tree.map(lambda is_first: "first" if is_first else "second", chooses(params))

    return optax.partition({"first": first, "second": second}, labels)


def _map_shapes(function: Callable[[Any], bool], params: optax.Params) -> Any:
    return jax.tree.map(function, own_shapes(params))


# --- decay and learning rate ---


def _add_decay(get_decays: NumbersOf) -> optax.GradientTransformation:
    """Add `decay * parameter` to the direction, before the learning rate: decoupled decay."""

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        return jax.tree.map(
            lambda u, p, decay: u + decay * p if decay else u, updates, params, get_decays(params)
        ), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


class RateState(NamedTuple):
    """Number of updates."""

    count: jax.Array


#: States with a `count` of updates that a schedule reads; those of optax are of a user's optimizer.
SCHEDULED = (RateState, ScheduleFreeState, optax.ScaleByScheduleState)


def _by_learning_rate(schedule: Schedule, get_factors: NumbersOf) -> optax.GradientTransformation:
    """Multiply by minus the learning rate, and by the factor of each parameter's group."""

    def init(params: optax.Params) -> RateState:
        del params
        return RateState(jnp.zeros((), jnp.int32))

    def update(
        updates: optax.Updates, state: RateState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, RateState]:
        rate = schedule(state.count)
        updates = jax.tree.map(lambda u, f: -rate * f * u, updates, get_factors(params))
        return updates, RateState(state.count + 1)

    return create_transformation(init, update)


def _factors(arguments: TrainingArguments, params: optax.Params | None) -> ParamTree:
    """Return the learning rate factor of each parameter; Muon's AdamW has a separate rate."""
    factors = learning_rate_factors(arguments, params)
    adam_rate = arguments.optimizer_kwargs.get("adam_learning_rate")
    if adam_rate is None:
        return factors
    ratio = adam_rate / arguments.learning_rate
    return jax.tree.map(lambda f, muon: f if muon else f * ratio, factors, matrices(params))


def _clip_by_norm(
    inner: optax.GradientTransformation, largest: float
) -> optax.GradientTransformation:
    """Clip by global norm without a state, so that the option does not change the structure."""

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        scale = jnp.minimum(1.0, largest / (global_norm(updates) + 1e-12))
        updates = jax.tree.map(lambda u: u * scale.astype(u.dtype), updates)
        return inner.update(updates, state, params)

    return optax.GradientTransformation(inner.init, update)
