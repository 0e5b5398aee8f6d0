"""The train step and the evaluation step: one jitted pure function each, over flat leaves.

Merging the module happens while tracing, never per step: a call of the compiled function sees a
tuple of arrays and a dict of arrays, which costs microseconds where `nnx.jit` costs milliseconds.

Legend: a microbatches of a step, b rows of a microbatch, s sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from ed_infra.outputs import Metric, add_metrics
from flax import nnx

from ed_trainers.optimizers import global_norm
from ed_trainers.placement import replicated
from ed_trainers.schedules import Schedule
from ed_trainers.state import EasyDeLState

Leaves = tuple[jax.Array, ...]
Batch = Mapping[str, jax.Array]


class LossFn(Protocol):
    """A method's loss: sums, not means, so that microbatches add up to the big batch exactly.

    The step differentiates `loss_sum` and divides once, by the weight of the metric `"loss"` over
    the whole optimizer step.
    """

    def __call__(
        self, model: Any, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, Metric]]:
        """Return the loss summed over a batch, and metrics, one of them named `"loss"`.

        Args:
            model: the module.
            batch: arrays, [b, s].
            key: randomness of this microbatch; None means deterministic (evaluation).
        """
        ...


def build_train_step(
    state: EasyDeLState, loss_fn: LossFn, schedule: Schedule, *, rows: int, seed: int
) -> Callable[[Leaves, Batch], tuple[Leaves, dict[str, jax.Array]]]:
    """Compile one optimizer step for states that look like `state`.

    Args:
        state: gives structure and shardings; its arrays are not kept.
        loss_fn: the method.
        schedule: learning rate by step, for the report; the optimizer has its own.
        rows: b, sequences of a microbatch over all devices.
        seed: seed of the run. Microbatch i of step t draws from
            `fold_in(fold_in(seed, t), i * b)`: from the step and the row, not from a counter.

    Returns:
        A function `(leaves, batch) -> (leaves, report)`. `leaves` are `jax.tree.leaves(state)`, and
        are donated; each array of the batch has a leading axis a. The report holds float32
        scalars: the mean of each metric, `weight`, `learning_rate`, `grad_norm`.
    """
    treedef = jax.tree.structure(state)
    graphdef = state.graphdef
    shardings = tuple(leaf.sharding for leaf in jax.tree.leaves(state))

    # Jitted so that tracing it for shapes and tracing it in the scan is one trace.
    @partial(jax.jit, inline=True)
    def microbatch(graphstate: Any, graphother: Any, batch: Batch, key: jax.Array) -> Any:
        def loss(params: Any) -> tuple[jax.Array, dict[str, Metric]]:
            total, metrics = loss_fn(nnx.merge(graphdef, params, graphother), batch, key)
            return total.astype(jnp.float32), metrics

        grads, metrics = jax.grad(loss, has_aux=True)(graphstate)
        return jax.tree.map(lambda g: g.astype(jnp.float32), grads), metrics

    def step(leaves: Leaves, batch: Batch) -> tuple[Leaves, dict[str, jax.Array]]:
        current: EasyDeLState = jax.tree.unflatten(treedef, leaves)
        key = jax.random.fold_in(jax.random.key(seed), current.step)
        count = next(iter(batch.values())).shape[0]
        indices = jnp.arange(count, dtype=jnp.int32)

        def one(index: jax.Array, part: Batch) -> Any:
            own = jax.random.fold_in(key, index * rows)
            return microbatch(current.graphstate, current.graphother, part, own)

        first = (indices[0], {name: array[0] for name, array in batch.items()})
        if count == 1:
            grads, metrics = one(*first)
        else:
            shapes = jax.eval_shape(one, *first)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

            def body(sums: Any, index_and_part: Any) -> tuple[Any, None]:
                new_grads, new_metrics = one(*index_and_part)
                grads = jax.tree.map(jnp.add, sums[0], new_grads)
                return (grads, add_metrics(sums[1], new_metrics)), None

            (grads, metrics), _ = jax.lax.scan(body, zeros, (indices, batch))

        weight = metrics["loss"].weight
        scale = 1.0 / jnp.maximum(weight, 1e-8)
        grads = jax.tree.map(lambda g: g * scale, grads)
        report = {name: metric.value for name, metric in metrics.items()}
        report |= {
            "weight": weight,
            "learning_rate": schedule(current.step),
            "grad_norm": global_norm(grads),
        }
        new = current.apply_gradients(grads=grads)
        return tuple(jax.tree.leaves(new)), report

    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, replicated(shardings[0])))


def build_eval_step(
    state: EasyDeLState, loss_fn: LossFn
) -> Callable[[Leaves, Batch], dict[str, Metric]]:
    """Compile the metrics of one batch, without gradient and without randomness.

    Args:
        state: gives the structure.
        loss_fn: the method.

    Returns:
        A function `(leaves, batch) -> metrics`. `leaves` are the leaves of `graphstate`, then of
        `graphother`; the arrays of the batch are [b, s].
    """
    treedef = jax.tree.structure((state.graphstate, state.graphother))
    graphdef = state.graphdef  # not the state: holding its arrays would keep donated buffers

    def step(leaves: Leaves, batch: Batch) -> dict[str, Metric]:
        graphstate, graphother = jax.tree.unflatten(treedef, leaves)
        return loss_fn(nnx.merge(graphdef, graphstate, graphother), batch, None)[1]

    return jax.jit(step, out_shardings=replicated(state.step.sharding))
