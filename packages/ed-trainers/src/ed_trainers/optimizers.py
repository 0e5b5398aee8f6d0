"""The optimizer of a run: learning rate, rules by name, clipping, float32 masters, in one chain.

Parameters are told apart by canonical name (`model.layers.3.input_layernorm.weight`), never by
rank: a norm's weight has rank two when its layers are stacked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from ed_infra.paths import canonical
from ed_infra.rules import Rules

from ed_trainers.base_arguments import OPTIMIZERS, TrainingArguments

#: Parameters that weight decay leaves alone: biases, whatever a norm holds, and the rates, steps,
#: skips and mixtures of a recurrence (Mamba, RG-LRU, RWKV).
_OWN = r"bias|A_log|D|dt_bias|\w+_gate_bias|recurrent_param|time_(decay|first|mix_\w+)"
NO_DECAY = re.compile(rf"(^|\.)({_OWN})$|norm[^.]*(\.(weight|scale|bias))?$", re.IGNORECASE)

#: The parameters of an optimizer; optax lets callers leave them out, ours never do.
Params = optax.Params | None
#: A tree like the parameters with one number for each.
Numbers = optax.Params

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


class MasterState(NamedTuple):
    """State of `with_masters`.

    Attributes:
        masters: float32 copies; `optax.MaskedNode` where the parameter itself is float32.
        inner: state of the optimizer that updates them.
    """

    masters: optax.Params
    inner: optax.OptState


def decays(path: Sequence[object]) -> bool:
    """Tell whether weight decay applies, without any rule, to the parameter stored at a path."""
    return not NO_DECAY.search(canonical(path)[0])


def weight_decays(arguments: TrainingArguments, params: Params) -> Numbers:
    """Return the weight decay of each parameter.

    Raises:
        ConfigError: a rule matches no parameter.
    """
    rules = Rules(arguments.weight_decay_rules, kind="weight decay rule")

    def decay(path: Sequence[object], _: jax.Array) -> float:
        return rules.at(path, arguments.weight_decay if decays(path) else 0.0)

    numbers = jax.tree_util.tree_map_with_path(decay, params)
    rules.check_used()
    return numbers


def learning_rate_factors(arguments: TrainingArguments, params: Params) -> Numbers:
    """Return the factor on the learning rate of each parameter.

    Raises:
        ConfigError: a rule matches no parameter.
    """
    return Rules(arguments.learning_rate_rules, kind="learning rate rule").tree(params, 1.0)


def check_rules(arguments: TrainingArguments, params: Params) -> None:
    """Look up every rule that the optimizer will follow, before training begins.

    Raises:
        ConfigError: a rule matches no parameter.
    """
    weight_decays(arguments, params)
    learning_rate_factors(arguments, params)


def build_optimizer(
    arguments: TrainingArguments, schedule: Schedule
) -> optax.GradientTransformation:
    """Make the gradient transformation that the arguments describe.

    Gradients may come in any float dtype. The structure of the state depends on `optimizer` and on
    the dtypes of the parameters alone, so a resumed run may change every other setting.
    """
    core = _core(arguments, schedule)
    if arguments.learning_rate_rules:
        core = _scaled(core, partial(learning_rate_factors, arguments))
    core = with_masters(core) if arguments.master_dtype else _in_parameter_dtype(core)
    if arguments.clip_grad is None:
        return core
    return _clipped(core, arguments.clip_grad)


def _core(arguments: TrainingArguments, schedule: Schedule) -> optax.GradientTransformation:
    settings = OPTIMIZERS[arguments.optimizer](**arguments.optimizer_kwargs).model_dump()
    decay_of = partial(weight_decays, arguments)
    if arguments.optimizer in ("adamw", "lion"):
        # optax.adamw and optax.lion, with a weight decay for each parameter.
        scale = optax.scale_by_adam if arguments.optimizer == "adamw" else optax.scale_by_lion
        return optax.chain(
            scale(**settings, mu_dtype=arguments.tx_mu_dtype),
            _add_decay(decay_of),
            optax.scale_by_learning_rate(schedule),
        )
    # The decay that optax itself has for adafactor is not multiplied by the learning rate.
    build = {"adafactor": optax.adafactor, "rmsprop": optax.rmsprop, "sgd": optax.sgd}
    return optax.chain(
        build[arguments.optimizer](schedule, **settings), _decoupled_decay(schedule, decay_of)
    )


def _add_decay(decay_of: Callable[[Params], Numbers]) -> optax.GradientTransformation:
    """Add `decay * parameter` to the direction, before the learning rate."""

    def update(
        updates: optax.Updates, state: optax.OptState, params: Params = None
    ) -> tuple[optax.Updates, optax.OptState]:
        return jax.tree.map(
            lambda u, p, decay: u + decay * p if decay else u, updates, params, decay_of(params)
        ), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


class _DecayState(NamedTuple):
    count: jax.Array


def _decoupled_decay(
    schedule: Schedule, decay_of: Callable[[Params], Numbers]
) -> optax.GradientTransformation:
    """Subtract `learning_rate * decay * parameter`."""

    def init(params: Params) -> _DecayState:
        del params
        return _DecayState(jnp.zeros((), jnp.int32))

    def update(
        updates: optax.Updates, state: _DecayState, params: Params = None
    ) -> tuple[optax.Updates, _DecayState]:
        rate = schedule(state.count)
        updates = jax.tree.map(
            lambda u, p, decay: u - rate * decay * p if decay else u,
            updates,
            params,
            decay_of(params),
        )
        return updates, _DecayState(state.count + 1)

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]


def _scaled(
    inner: optax.GradientTransformation, factors_of: Callable[[Params], Numbers]
) -> optax.GradientTransformation:
    """Multiply the updates by a factor for each parameter: learning rates by group.

    All that the optimizers here do is proportional to the learning rate, decay and momentum too.
    """

    def update(
        updates: optax.Updates, state: optax.OptState, params: Params = None
    ) -> tuple[optax.Updates, optax.OptState]:
        updates, state = inner.update(updates, state, params)
        scaled = jax.tree.map(lambda u, factor: u * factor, updates, factors_of(params))
        return scaled, state

    return optax.GradientTransformation(inner.init, update)


def _is_low(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating) and jnp.finfo(leaf.dtype).bits < 32


def _masked(leaf: object) -> bool:
    return isinstance(leaf, optax.MaskedNode)


def with_masters(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Run an optimizer on float32 copies of the parameters that are stored below float32.

    The updates that come out are float32; `apply_updates` turns the new masters into the new
    parameters. Without such parameters the state is that of `inner` behind an empty tuple.
    """

    def merged(masters: optax.Params, params: Params) -> optax.Params:
        return jax.tree.map(lambda m, p: p if _masked(m) else m, masters, params, is_leaf=_masked)

    def init(params: Params) -> MasterState:
        masters = jax.tree.map(
            lambda p: p.astype(jnp.float32) if _is_low(p) else optax.MaskedNode(), params
        )
        return MasterState(masters, inner.init(merged(masters, params)))

    def update(
        updates: optax.Updates, state: MasterState, params: Params = None
    ) -> tuple[optax.Updates, MasterState]:
        updates = jax.tree.map(lambda u: u.astype(jnp.float32), updates)
        updates, inner_state = inner.update(updates, state.inner, merged(state.masters, params))
        masters = jax.tree.map(
            lambda m, u: m if _masked(m) else m + u, state.masters, updates, is_leaf=_masked
        )
        return updates, MasterState(masters, inner_state)

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]


def _in_parameter_dtype(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Keep the state's dtypes what `init` made them: float32 gradients would widen the moments."""

    def update(
        updates: optax.Updates, state: optax.OptState, params: Params = None
    ) -> tuple[optax.Updates, optax.OptState]:
        updates = jax.tree.map(lambda u, p: u.astype(p.dtype), updates, params)
        updates, new = inner.update(updates, state, params)
        return updates, jax.tree.map(lambda n, o: n.astype(o.dtype), new, state)

    return optax.GradientTransformation(inner.init, update)


def _clipped(inner: optax.GradientTransformation, largest: float) -> optax.GradientTransformation:
    """Clip by global norm without a state of its own, so that switching it keeps the structure."""

    def update(
        updates: optax.Updates, state: optax.OptState, params: Params = None
    ) -> tuple[optax.Updates, optax.OptState]:
        scale = jnp.minimum(1.0, largest / (global_norm(updates) + 1e-12))
        updates = jax.tree.map(lambda u: u * scale.astype(u.dtype), updates)
        return inner.update(updates, state, params)

    return optax.GradientTransformation(inner.init, update)


def global_norm(tree: optax.Updates) -> jax.Array:
    """Euclidean norm over all leaves, accumulated in float32."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))


def apply_updates(
    params: optax.Params, updates: optax.Updates, opt_state: optax.OptState
) -> optax.Params:
    """Add the updates; a parameter that has a master becomes that master, rounded once.

    Args:
        params: the parameters before the step.
        updates: what the optimizer returned for them.
        opt_state: the optimizer's state *after* the step.
    """
    if not isinstance(opt_state, MasterState):
        return optax.apply_updates(params, updates)

    def new(master: Any, param: jax.Array, update: jax.Array) -> jax.Array:
        return (param + update if _masked(master) else master).astype(param.dtype)

    return jax.tree.map(new, opt_state.masters, params, updates, is_leaf=_masked)
