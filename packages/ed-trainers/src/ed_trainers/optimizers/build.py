"""The optimizer of a run, in one chain: direction, rules, float32 masters, clipping, skipping."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from ed_trainers.optimizers.dion import scale_by_dion
from ed_trainers.optimizers.eight_bit import SMALLEST, eight_bit
from ed_trainers.optimizers.ema import with_ema
from ed_trainers.optimizers.groups import ParamTree, learning_rate_factors, weight_decays
from ed_trainers.optimizers.kron import scale_by_kron
from ed_trainers.optimizers.mars import scale_by_mars
from ed_trainers.optimizers.masters import in_parameter_dtype, with_masters
from ed_trainers.optimizers.muon import matrices, scale_by_muon
from ed_trainers.optimizers.per_array import (
    create_transformation,
    map_parameters,
    own_shapes,
    per_array,
    stacked_axes,
)
from ed_trainers.optimizers.schedule_free import ScheduleFreeState, schedule_free
from ed_trainers.optimizers.schedules import Schedule
from ed_trainers.optimizers.skip import skip_bad_steps
from ed_trainers.optimizers.soap import scale_by_soap
from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.optimizers import (
    DionSettings,
    KronSettings,
    MarsSettings,
    MuonSettings,
    QuadSettings,
    ScheduleFreeAdamWSettings,
    SkewSettings,
    SoapSettings,
    optimizer_settings,
)

Direction = optax.GradientTransformation
#: Smallest share of the updates of a cautious step by which they are divided.
_LEAST_SHARE = 1e-3
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
    values = settings.model_dump()
    is_cautious = values.pop("cautious", False)
    direction = DIRECTIONS[arguments.optimizer](values, arguments.tx_mu_dtype)
    core = optax.chain(
        _limit_to_gradient_signs(direction) if is_cautious else direction,
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
    return _split(large, inner, _are_large)


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


def _adam(settings: MuonSettings | MarsSettings | DionSettings) -> Direction:
    """Return AdamW of the parameters that an optimizer of matrices leaves out."""
    return optax.scale_by_adam(settings.adam_b1, settings.adam_b2, settings.adam_eps)


def _muon(settings: dict[str, Any], mu_dtype: str | None) -> Direction:
    del mu_dtype
    muon_settings = MuonSettings(**settings)
    return _split(per_array(scale_by_muon(muon_settings)), _adam(muon_settings), matrices)


def _muon_8bit(settings: dict[str, Any], mu_dtype: str | None) -> Direction:
    """Store the momentum of large matrices, and Adam's moments of large arrays, in eight bits."""
    del mu_dtype
    block_size = settings.pop("block_size")
    muon_settings = MuonSettings(**settings)
    muon = scale_by_muon(muon_settings)
    large = per_array(eight_bit(muon, block_size=block_size))
    adam = _adam(muon_settings)
    large_adam = per_array(eight_bit(adam, block_size=block_size))
    return _split(
        _split(large, per_array(muon), _are_large), _split(large_adam, adam, _are_large), matrices
    )


def _dion(settings: dict[str, Any], mu_dtype: str | None) -> Direction:
    del mu_dtype
    dion_settings = DionSettings(**settings)
    return _split(per_array(scale_by_dion(dion_settings)), _adam(dion_settings), matrices)


def _mars(settings: dict[str, Any], mu_dtype: str | None) -> Direction:
    del mu_dtype
    mars_settings = MarsSettings(**settings)
    return _split(
        per_array(scale_by_mars(mars_settings)),
        _adam(mars_settings),
        lambda params: _map_shapes(lambda array: len(array.shape) == 2, params),
    )


def _soap(settings: dict[str, Any], mu_dtype: str | None) -> Direction:
    del mu_dtype
    return scale_by_soap(SoapSettings(**settings))


def _adopt(settings: dict[str, Any], mu_dtype: str | None) -> Direction:
    """Return ADOPT (Taniguchi et al. 2024, arXiv 2411.02853), whose first update is 0."""
    del mu_dtype
    return optax.contrib.scale_by_adopt(**settings)


def _ademamix(settings: dict[str, Any], mu_dtype: str | None) -> Direction:
    """Return AdEMAMix (Pagliardini et al. 2024, arXiv 2409.03137) with its two warm-ups.

    optax passes the number of earlier updates to a schedule; the authors count the present one.
    """
    del mu_dtype
    alpha_steps, b3_steps = settings.pop("alpha_warmup"), settings.pop("b3_warmup")
    alpha, b1, b3 = settings["alpha"], settings["b1"], settings["b3"]

    def grow_alpha(count: jax.Array) -> jax.Array:
        return alpha * jnp.minimum((count + 1) / alpha_steps, 1.0)

    def grow_b3(count: jax.Array) -> jax.Array:
        # The half-life of a mean, which is linear in the number of the step.
        first, last = (math.log(0.5) / math.log(max(b, 1e-8)) - 1 for b in (b1, b3))
        share = jnp.minimum((count + 1) / b3_steps, 1.0)
        return 0.5 ** (1 / ((1 - share) * first + share * last + 1))

    settings["alpha"] = alpha if alpha_steps is None else grow_alpha
    settings["b3"] = b3 if b3_steps is None else grow_b3
    return optax.contrib.scale_by_ademamix(**settings)


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
    "muon_8bit": _muon_8bit,
    "rmsprop": _rmsprop,
    "sgd": _sgd,
    "mars": _mars,
    "quad": partial(_kron, QuadSettings),
    "skew": partial(_kron, SkewSettings),
    "schedule_free_adamw": _schedule_free_adamw,
    "soap": _soap,
    "adopt": _adopt,
    "ademamix": _ademamix,
    "dion": _dion,
}


def _split(
    first: Direction, second: Direction, chooses: Callable[[optax.Params], Any]
) -> optax.GradientTransformation:
    """Apply one transformation to the selected parameters and another to all others."""

    def labels(params: optax.Params) -> Any:
        return jax.tree.map(lambda is_first: "first" if is_first else "second", chooses(params))

    return optax.partition({"first": first, "second": second}, labels)


def _are_large(params: optax.Params) -> Any:
    return _map_shapes(lambda array: array.size >= SMALLEST, params)


def _map_shapes(function: Callable[[Any], bool], params: optax.Params) -> Any:
    return jax.tree.map(function, own_shapes(params))


def _limit_to_gradient_signs(inner: Direction) -> optax.GradientTransformation:
    """Omit the updates whose sign differs from that of the gradient (arXiv 2411.16085, alg. 2).

    The remaining updates of each layer and expert are divided by their share, at least 0.001.
    """

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        directions, state = inner.update(updates, state, params)

        def limit(direction: jax.Array, grad: jax.Array, stacked: int) -> jax.Array:
            agrees = (direction * grad > 0).astype(jnp.float32)
            share = jnp.mean(agrees, axis=tuple(range(stacked, grad.ndim)), keepdims=True)
            factor = agrees / jnp.maximum(share, _LEAST_SHARE)
            return direction * factor.astype(direction.dtype)

        stacked_counts = map_parameters(stacked_axes, params)
        return jax.tree.map(limit, directions, updates, stacked_counts), state

    return optax.GradientTransformation(inner.init, update)


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
