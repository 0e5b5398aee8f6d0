"""The train step and the evaluation step: one jitted pure function each, over flat leaves.

Merging the modules happens while tracing, never per step: a call of the compiled function sees
tuples and dicts of arrays, which costs microseconds where `nnx.jit` costs milliseconds.

Legend: a microbatches of a step, b rows of a microbatch, s sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from ed_infra.outputs import Metric
from ed_layers import updated
from flax import nnx

from ed_trainers.contract import MAIN, Batch, Frozen, Loss, LossFn, Method, Models, logged
from ed_trainers.optimizers import Schedule, global_norm, was_skipped
from ed_trainers.placement import replicated
from ed_trainers.state import EasyDeLState

T = TypeVar("T")
Leaves = tuple[jax.Array, ...]
Report = dict[str, jax.Array]
Totals = dict[str, dict[str, jax.Array]]

# A weight below this is taken for this, so that a batch in which nothing counts divides by it.
_SMALLEST = 1e-8


class Step(Generic[T]):
    """A compiled function of the learner's leaves and a batch, with the frozen leaves bound.

    The frozen leaves are arguments of the program as the others are, and never donated.

    Attributes:
        before: a program that runs first, on the same arguments; its result, a dict, is one more
            argument. One that gives nothing is not asked again: what it gives follows from shapes.
    """

    def __init__(
        self,
        function: jax.stages.Wrapped,
        frozen: Leaves,
        before: jax.stages.Wrapped | None = None,
    ):
        self._function = function
        self._frozen = frozen
        self._nothing: tuple[object, ...] | None = () if before is None else None
        self.before = before

    def __call__(self, leaves: Leaves, batch: Batch) -> T:
        return self._function(*self._arguments(leaves, batch))

    def lower(self, leaves: Leaves, batch: Batch) -> jax.stages.Lowered:
        """Return the program for arguments like these, without running it."""
        arguments = (leaves, self._frozen, batch)
        before = () if self.before is None else (jax.eval_shape(self.before, *arguments),)
        return self._function.lower(*arguments, *before)

    def _arguments(self, leaves: Leaves, batch: Batch) -> tuple[object, ...]:
        arguments = (leaves, self._frozen, batch)
        if self._nothing is None:
            assert self.before is not None
            result = self.before(*arguments)
            if result:
                return *arguments, result
            self._nothing = (result,)
        return *arguments, *self._nothing


Metrics = dict[str, Metric]
TrainStep = Step[tuple[Leaves, Report]]
EvalStep = Step[tuple[Metrics, Metrics]]


def build_train_step(
    state: EasyDeLState, method: Method, schedule: Schedule, *, rows: int, seed: int
) -> TrainStep:
    """Compile one optimizer step for states that look like `state`.

    Args:
        state: gives structure and shardings; its arrays are not kept.
        method: the loss, and the frozen models, whose leaves each call passes on undonated.
        schedule: learning rate by step, for the report; the optimizer has its own.
        rows: b, sequences of a microbatch over all devices.
        seed: seed of the run. Microbatch i of step t draws from
            `fold_in(fold_in(seed, t), i * b)`: from the step and the row, not from a counter.

    Returns:
        A function `(leaves, batch) -> (leaves, report)`. `leaves` are `jax.tree.leaves(state)`, and
        are donated; each array of the batch has a leading axis a. The report holds float32
        scalars: the figures of `contract.logged`, `weight`, `learning_rate`, `grad_norm`.
    """
    treedef = jax.tree.structure(state)
    shardings = tuple(leaf.sharding for leaf in jax.tree.leaves(state))
    loss_of = _loss_of(state.graphdef, method.loss, method.frozen)
    statistics_of = _function_of(state.graphdef, method.statistics, method.frozen)
    following = method.frozen.following

    def numbered(batch: Batch) -> tuple[jax.Array, Batch]:
        """The microbatches, each with the number of its first row."""
        count = next(iter(batch.values())).shape[0]
        return jnp.arange(count, dtype=jnp.int32) * rows, batch

    # A program of its own, because the step needs the totals before its first gradient. As a part
    # of the step it would stand beside the gradients, and XLA's CPU backend runs collectives that
    # do not depend on each other in any order: the devices then wait for each other for ever.
    @jax.jit
    def totals_of(leaves: Leaves, frozen: Leaves, batch: Batch) -> Totals:
        """What the gradients need of all microbatches: empty where nothing is needed.

        `weights`, of each term of the loss, where there are several: they follow from the data, so
        the compiler drops the forward pass. `statistics` of the method, where it has some.
        """
        current: EasyDeLState = jax.tree.unflatten(treedef, leaves)
        frozen = method.frozen.joined(frozen, current.reference)
        key = jax.random.fold_in(jax.random.key(seed), current.step)

        def weights(row: jax.Array, part: Batch) -> dict[str, jax.Array]:
            own = jax.random.fold_in(key, row)
            loss = loss_of(current.graphstate, current.graphother, frozen, part, own)
            return {name: metric.weight for name, metric in loss.sums.items()}

        def statistics(row: jax.Array, part: Batch) -> dict[str, Metric]:
            own = jax.random.fold_in(key, row)
            return statistics_of(current.graphstate, current.graphother, frozen, part, own)

        parts = numbered(batch)
        totals: Totals = {}
        if len(parts[0]) == 1:
            return totals
        if len(jax.eval_shape(weights, *jax.tree.map(lambda x: x[0], parts))) > 1:
            totals["weights"] = _summed(weights, parts)
        if method.statistics is not None:
            sums = _summed(statistics, parts)
            totals["statistics"] = {name: metric.value for name, metric in sums.items()}
        return totals

    def step(leaves: Leaves, frozen: Leaves, batch: Batch, totals: Totals) -> tuple[Leaves, Report]:
        current: EasyDeLState = jax.tree.unflatten(treedef, leaves)
        frozen = method.frozen.joined(frozen, current.reference)
        key = jax.random.fold_in(jax.random.key(seed), current.step)
        parts = numbered(batch)

        # Jitted so that tracing it for shapes and tracing it in the scan is one trace.
        @partial(jax.jit, inline=True)
        def gradient(row: jax.Array, part: Batch) -> tuple[nnx.State, Loss, jax.Array]:
            def objective(params: nnx.State) -> tuple[jax.Array, Loss]:
                own = jax.random.fold_in(key, row)
                read = {**part, **totals.get("statistics", {})}
                loss = loss_of(params, current.graphother, frozen, read, own)
                return _objective(loss.sums, totals.get("weights", {})), loss

            grads, loss = jax.grad(objective, has_aux=True)(current.gradient_point)
            return jax.tree.map(lambda g: g.astype(jnp.float32), grads), loss, _tokens(part)

        if len(parts[0]) == 1:
            grads, loss, tokens = gradient(*jax.tree.map(lambda x: x[0], parts))
        else:
            grads, loss, tokens = _summed(gradient, parts)

        weight = loss.sums[MAIN].weight
        scale = 1.0 / jnp.maximum(weight, _SMALLEST)
        grads = jax.tree.map(lambda g: g * scale, grads)
        terms, metrics = (
            {name: metric.value for name, metric in of.items()} for of in (loss.sums, loss.metrics)
        )
        report = logged(terms, metrics) | {
            "weight": weight,
            "learning_rate": schedule(current.step),
            "grad_norm": global_norm(grads),
            "tokens": tokens,
        }
        new = current.apply_gradients(grads=grads, value=report["loss"])
        other = updated.apply_updates(new.graphother, loss.updates, trained=new.graphstate)
        skipped = was_skipped(new.opt_state)
        if skipped is not None:
            report["skipped"] = skipped.astype(jnp.float32)
            other = jax.tree.map(partial(jnp.where, skipped), current.graphother, other)
        new = new.replace(graphother=other)
        if following is not None and current.reference is not None:
            moved = following.moved(current.reference, new.graphstate, new.step)
            new = new.replace(reference=moved)
        return tuple(jax.tree.leaves(new)), report

    out = (shardings, replicated(shardings[0]))
    compiled = jax.jit(step, donate_argnums=0, out_shardings=out)
    return Step(compiled, method.frozen.fixed, totals_of)


def build_eval_step(state: EasyDeLState, method: Method) -> EvalStep:
    """Compile the sums of one batch, without gradient and without randomness.

    Args:
        state: gives the structure.
        method: the loss, and the frozen models.

    Returns:
        A function `(leaves, batch) -> (terms, metrics)`, `sums` and `metrics` of the loss. `leaves`
        are the leaves of `graphstate`, then of `graphother`, then of `reference`; the arrays of the
        batch are [b, s], and it holds the method's statistics where there are any.
    """
    loss_of = _loss_of(state.graphdef, method.loss, method.frozen)

    def sums(*arguments: Any) -> tuple[Metrics, Metrics]:
        loss = loss_of(*arguments)
        return loss.sums, loss.metrics

    return _evaluating(state, method, sums)


def build_statistics_step(state: EasyDeLState, method: Method) -> Step[Metrics]:
    """Compile the method's statistics of one batch; arguments as of `build_eval_step`."""
    function = _function_of(state.graphdef, method.statistics, method.frozen)
    return _evaluating(state, method, function)


def _evaluating(state: EasyDeLState, method: Method, function: Callable[..., T]) -> Step[T]:
    """Compile a function of `_function_of` for the leaves of an evaluated state, without a key."""
    # The structure alone: to hold the state's arrays would keep donated buffers.
    treedef = jax.tree.structure((state.graphstate, state.graphother, state.reference))

    def step(leaves: Leaves, frozen: Leaves, batch: Batch) -> T:
        graphstate, graphother, reference = jax.tree.unflatten(treedef, leaves)
        frozen = method.frozen.joined(frozen, reference)
        return function(graphstate, graphother, frozen, batch, None)

    compiled = jax.jit(step, out_shardings=replicated(state.step.sharding))
    return Step(compiled, method.frozen.fixed)


def _loss_of(graphdef: nnx.GraphDef, loss_fn: LossFn, frozen: Frozen) -> Callable[..., Loss]:
    """The loss as a function of arrays: `(graphstate, graphother, frozen leaves, batch, key)`."""

    function = _function_of(graphdef, loss_fn, frozen)
    return lambda *arguments: function(*arguments).checked()


def _function_of(
    graphdef: nnx.GraphDef, function: Callable[..., T] | None, frozen: Frozen
) -> Callable[..., T]:
    """A function of models as one of arrays: `(graphstate, graphother, frozen leaves, ...)`."""

    def of_arrays(
        graphstate: nnx.State,
        graphother: nnx.State,
        leaves: Leaves,
        batch: Batch,
        key: jax.Array | None,
    ) -> T:
        assert function is not None, "asked for where there is one"
        learner = nnx.merge(graphdef, graphstate, graphother)
        return function(Models(learner, frozen.merge(leaves)), batch, key)

    return of_arrays


def _tokens(batch: Batch) -> jax.Array:
    """Tokens of a batch that are not padding, over all processes."""
    if "segment_ids" in batch:
        return jnp.count_nonzero(batch["segment_ids"])
    return jnp.asarray(batch["input_ids"].size if "input_ids" in batch else 0)


def _objective(sums: dict[str, Metric], totals: dict[str, jax.Array]) -> jax.Array:
    """Return a microbatch's part of the step's loss, times the step's weight of the main term.

    The loss of a step is the sum of `sum / weight` over its terms, with sums and weights over all
    microbatches. The step divides by the weight of the main term once, at the end. The other terms
    are therefore multiplied by that weight here.

    Args:
        sums: of the microbatch.
        totals: weight of each term over the whole step; empty where this is the only microbatch,
            or the main term is the only one.
    """
    objective = sums[MAIN].sum
    totals = totals or {name: jax.lax.stop_gradient(m.weight) for name, m in sums.items()}
    for name, metric in sums.items():
        if name != MAIN:
            share = jnp.maximum(totals[MAIN], _SMALLEST) / jnp.maximum(totals[name], _SMALLEST)
            objective = objective + metric.sum * share
    return objective


def _summed(function: Callable[..., T], parts: tuple[jax.Array, Batch]) -> T:
    """Sum what a function of a microbatch returns, a tree of arrays, over stacked microbatches."""
    shapes = jax.eval_shape(function, *jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def body(sums: T, part: tuple[jax.Array, Batch]) -> tuple[T, None]:
        return jax.tree.map(jnp.add, sums, function(*part)), None

    return jax.lax.scan(body, zeros, parts)[0]
