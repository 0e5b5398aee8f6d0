"""The optimizer of a run: clipping, float32 masters, decay masks, learning rate, in one chain.

Parameters are told apart by canonical name (`model.layers.3.input_layernorm.weight`), never by
rank: a norm's weight has rank two when its layers are stacked.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from ed_infra.paths import canonical

from ed_trainers.arguments import OPTIMIZERS, TrainingArguments
from ed_trainers.schedules import Schedule

#: Parameters that weight decay leaves alone: biases, and whatever a norm holds.
NO_DECAY = re.compile(r"(^|\.)bias$|norm[^.]*(\.(weight|scale|bias))?$", re.IGNORECASE)


class MasterState(NamedTuple):
    """State of `with_masters`.

    Attributes:
        masters: float32 copies; `optax.MaskedNode` where the parameter itself is float32.
        inner: state of the optimizer that updates them.
    """

    masters: Any
    inner: Any


def decays(path: tuple[Any, ...]) -> bool:
    """Tell whether weight decay applies to the parameter stored at a path."""
    return not NO_DECAY.search(canonical(path)[0])


def decay_mask(params: Any) -> Any:
    """Return the tree of booleans that optax's masks want."""
    return jax.tree_util.tree_map_with_path(lambda path, _: decays(path), params)


def build_optimizer(
    arguments: TrainingArguments, schedule: Schedule
) -> optax.GradientTransformation:
    """Make the gradient transformation that the arguments describe.

    Gradients may come in any float dtype. The structure of the state depends on `optimizer` and on
    the dtypes of the parameters alone, so a resumed run may change every other setting.
    """
    core = _core(arguments, schedule)
    core = with_masters(core) if arguments.master_dtype else _in_parameter_dtype(core)
    if arguments.clip_grad is None:
        return core
    return _clipped(core, arguments.clip_grad)


def _core(arguments: TrainingArguments, schedule: Schedule) -> optax.GradientTransformation:
    given: dict[str, Any] = {**OPTIMIZERS[arguments.optimizer], **arguments.optimizer_kwargs}
    decay = arguments.weight_decay
    if arguments.optimizer in ("adamw", "lion"):
        build = optax.adamw if arguments.optimizer == "adamw" else optax.lion
        return build(
            schedule, **given, mu_dtype=arguments.tx_mu_dtype, weight_decay=decay, mask=decay_mask
        )
    if arguments.optimizer == "adafactor":
        # optax's own weight decay for adafactor is not multiplied by the learning rate.
        scale = optax.adafactor(schedule, **given)
        return optax.chain(scale, _decoupled_decay(schedule, decay))
    build = {"rmsprop": optax.rmsprop, "sgd": optax.sgd}[arguments.optimizer]
    return optax.chain(build(schedule, **given), _decoupled_decay(schedule, decay))


class _DecayState(NamedTuple):
    count: jax.Array


def _decoupled_decay(schedule: Schedule, decay: float) -> optax.GradientTransformation:
    """Subtract `learning_rate * decay * parameter` where the mask allows it."""

    def init(params: Any) -> _DecayState:
        del params
        return _DecayState(jnp.zeros((), jnp.int32))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, _DecayState]:
        rate = schedule(state.count) * decay
        updates = jax.tree.map(
            lambda u, p, on: u - rate * p if on else u, updates, params, decay_mask(params)
        )
        return updates, _DecayState(state.count + 1)

    return optax.GradientTransformation(init, update)


def _is_low(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating) and jnp.finfo(leaf.dtype).bits < 32


def _masked(leaf: Any) -> bool:
    return isinstance(leaf, optax.MaskedNode)


def with_masters(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Run an optimizer on float32 copies of the parameters that are stored below float32.

    The updates that come out are float32; `apply_updates` turns the new masters into the new
    parameters. Without such parameters the state is that of `inner` behind an empty tuple.
    """

    def merged(masters: Any, params: Any) -> Any:
        return jax.tree.map(lambda m, p: p if _masked(m) else m, masters, params, is_leaf=_masked)

    def init(params: Any) -> MasterState:
        masters = jax.tree.map(
            lambda p: p.astype(jnp.float32) if _is_low(p) else optax.MaskedNode(), params
        )
        return MasterState(masters, inner.init(merged(masters, params)))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MasterState]:
        updates = jax.tree.map(lambda u: u.astype(jnp.float32), updates)
        updates, inner_state = inner.update(updates, state.inner, merged(state.masters, params))
        masters = jax.tree.map(
            lambda m, u: m if _masked(m) else m + u, state.masters, updates, is_leaf=_masked
        )
        return updates, MasterState(masters, inner_state)

    return optax.GradientTransformation(init, update)


def _in_parameter_dtype(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Keep the state's dtypes what `init` made them: float32 gradients would widen the moments."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates = jax.tree.map(lambda u, p: u.astype(p.dtype), updates, params)
        updates, new = inner.update(updates, state, params)
        return updates, jax.tree.map(lambda n, o: n.astype(o.dtype), new, state)

    return optax.GradientTransformation(inner.init, update)


def _clipped(inner: optax.GradientTransformation, largest: float) -> optax.GradientTransformation:
    """Clip by global norm without a state of its own, so that switching it keeps the structure."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        scale = jnp.minimum(1.0, largest / (global_norm(updates) + 1e-12))
        updates = jax.tree.map(lambda u: u * scale.astype(u.dtype), updates)
        return inner.update(updates, state, params)

    return optax.GradientTransformation(inner.init, update)


def global_norm(tree: Any) -> jax.Array:
    """Euclidean norm over all leaves, accumulated in float32."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))


def apply_updates(params: Any, updates: Any, opt_state: Any) -> Any:
    """Add the updates; a parameter that has a master becomes that master, rounded once.

    Args:
        params: the parameters before the step.
        updates: what the optimizer returned for them.
        opt_state: the optimizer's state *after* the step.
    """
    if not isinstance(opt_state, MasterState):
        return optax.apply_updates(params, updates)

    def new(master: Any, param: Any, update: Any) -> Any:
        return (param + update if _masked(master) else master).astype(param.dtype)

    return jax.tree.map(new, opt_state.masters, params, updates, is_leaf=_masked)
