"""The train step and the evaluation step: one jitted pure function each, over flat leaves.

Modules are merged while tracing, not in every step. A compiled function receives tuples of arrays,
which costs microseconds per call instead of the milliseconds of `nnx.jit`.

Legend: a microbatches of a step, b rows of a microbatch, s sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
from ed_infra.outputs import Metric
from ed_infra.sharding.placement import ShardedConfig
from ed_layers import updated
from flax import nnx

from ed_trainers.contract import MAIN, Batch, Loss, MethodRun, Models, build_log_metrics
from ed_trainers.optimizers import Schedule, get_array_norms, global_norm, was_skipped
from ed_trainers.placement import replicate_sharding
from ed_trainers.roles.frozen import Frozen
from ed_trainers.state import EasyDeLState
from ed_trainers.step_program import ObservedRun, StoredStep

T = TypeVar("T")
Leaves = tuple[jax.Array, ...]
StepReport = dict[str, jax.Array]
Totals = dict[str, dict[str, jax.Array]]

# Lower bound of a weight: a batch without a counted token divides by it.
_SMALLEST = 1e-8


class Step(Generic[T]):
    """A compiled function of the learner's leaves and a batch, with the frozen leaves bound.

    The frozen leaves are arguments of the program and never donated.

    Attributes:
        before: a program that runs first on the same arguments; its result, a dict, is a further
            argument. Whether the dict is empty depends on shapes only, so a program that returned
            an empty dict is not called again.
    """

    def __init__(
        self,
        function: jax.stages.Wrapped | StoredStep,
        frozen: Leaves,
        first_program: jax.stages.Wrapped | None = None,
    ):
        self._function = function
        self._frozen = frozen
        self._nothing: tuple[object, ...] | None = () if first_program is None else None
        self.before = first_program

    def __call__(self, leaves: Leaves, batch: Batch) -> T:
        return self._function(*self._arguments(leaves, batch))

    def lower(self, leaves: Leaves, batch: Batch) -> jax.stages.Lowered:
        """Return the lowered program for such arguments."""
        arguments = (leaves, self._frozen, batch)
        first_results = () if self.before is None else (jax.eval_shape(self.before, *arguments),)
        return self._function.lower(*arguments, *first_results)

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
TrainStep = Step[tuple[Leaves, StepReport]]
EvalStep = Step[tuple[Metrics, Metrics]]


def build_train_step(
    state: EasyDeLState, method: MethodRun, schedule: Schedule, *, rows: int, seed: int
) -> TrainStep:
    """Compile one optimizer step for states that look like `state`.

    Args:
        state: structure and shardings of the state; its arrays are not kept.
        method: the loss and the frozen models, whose leaves are not donated.
        schedule: learning rate by step, for the report; the optimizer has its own schedule.
        rows: b, number of rows of a microbatch over all devices.
        seed: seed of the run. Microbatch i of step t uses the random key
            `fold_in(fold_in(seed, t), i * b)`, which depends on the step and the row only.

    Returns:
        A function `(leaves, batch) -> (leaves, report)`. `leaves` are `jax.tree.leaves(state)` and
        are donated; each array of the batch has a leading axis a. The report contains float32
        scalars: the figures of `contract.build_log_metrics`, `weight`, `learning_rate`,
            `grad_norm`.
    """
    treedef = jax.tree.structure(state)
    shardings = tuple(leaf.sharding for leaf in jax.tree.leaves(state))
    run = ObservedRun(method)
    compute_loss = _build_loss_function(state.graphdef, run.loss, method.frozen)
    compute_statistics = _build_function(state.graphdef, run.statistics, method.frozen)
    following = method.frozen.following

    def number_microbatches(batch: Batch) -> tuple[jax.Array, Batch]:
        """Return the number of the first row of each microbatch, and the microbatches."""
        count = next(iter(batch.values())).shape[0]
        return jnp.arange(count, dtype=jnp.int32) * rows, batch

    # The step needs the totals before its first gradient. A separate program, because XLA's CPU
    # backend runs independent collectives in any order: within one program, the devices can wait
    # for each other forever.
    @jax.jit
    def compute_totals(leaves: Leaves, frozen: Leaves, batch: Batch) -> Totals:
        """Return the sums over all microbatches that the gradients need.

        `weights` of each term of the loss, if there are several: they depend on the data only, so
        the compiler removes the forward pass. `statistics` of the method, if it has any.
        """
        current: EasyDeLState = jax.tree.unflatten(treedef, leaves)
        frozen = method.frozen.join_leaves(frozen, current.reference)
        key = jax.random.fold_in(jax.random.key(seed), current.step)

        def weights(row: jax.Array, part: Batch) -> dict[str, jax.Array]:
            row_key = jax.random.fold_in(key, row)
            loss = compute_loss(current.graphstate, current.graphother, frozen, part, row_key)
            return {name: metric.weight for name, metric in loss.sums.items()}

        def statistics(row: jax.Array, part: Batch) -> dict[str, Metric]:
            row_key = jax.random.fold_in(key, row)
            return compute_statistics(current.graphstate, current.graphother, frozen, part, row_key)

        parts = number_microbatches(batch)
        totals: Totals = {}
        if len(parts[0]) == 1:
            return totals
        if len(jax.eval_shape(weights, *jax.tree.map(lambda x: x[0], parts))) > 1:
            totals["weights"] = _sum_parts(weights, parts)
        if method.record.statistics is not None:
            sums = _sum_parts(statistics, parts)
            totals["statistics"] = {name: metric.value for name, metric in sums.items()}
        return totals

    def step(
        leaves: Leaves, frozen: Leaves, batch: Batch, totals: Totals
    ) -> tuple[Leaves, StepReport]:
        current: EasyDeLState = jax.tree.unflatten(treedef, leaves)
        frozen = method.frozen.join_leaves(frozen, current.reference)
        key = jax.random.fold_in(jax.random.key(seed), current.step)
        parts = number_microbatches(batch)

        # With jit, the shapes and the scan share one trace.
        @partial(jax.jit, inline=True)
        def gradient(row: jax.Array, part: Batch) -> tuple[nnx.State, Loss, jax.Array]:
            def objective(params: nnx.State) -> tuple[jax.Array, Loss]:
                row_key = jax.random.fold_in(key, row)
                read = part.replace(**totals.get("statistics", {}))
                loss = compute_loss(params, current.graphother, frozen, read, row_key)
                return _objective(loss.sums, totals.get("weights", {})), loss

            grads, loss = jax.grad(objective, has_aux=True)(current.gradient_point)
            return jax.tree.map(lambda g: g.astype(jnp.float32), grads), loss, _tokens(part)

        if len(parts[0]) == 1:
            grads, loss, tokens = gradient(*jax.tree.map(lambda x: x[0], parts))
        else:
            grads, loss, tokens = _sum_parts(gradient, parts)

        weight = loss.sums[MAIN].weight
        scale = 1.0 / jnp.maximum(weight, _SMALLEST)
        grads = jax.tree.map(lambda g: g * scale, grads)
        terms, metrics = (
            {name: metric.value for name, metric in of.items()} for of in (loss.sums, loss.metrics)
        )
        report = build_log_metrics(terms, metrics) | {
            "weight": weight,
            "learning_rate": schedule(current.step),
            "grad_norm": global_norm(grads),
            "tokens": tokens,
        }
        if method.arguments.log_grad_norms:
            report |= get_array_norms(grads)
        new = current.apply_gradients(grads=grads, value=report["loss"])
        other_variables = updated.apply_updates(
            new.graphother, loss.updates, trained=new.graphstate
        )
        skipped = was_skipped(new.opt_state)
        if skipped is not None:
            report["skipped"] = skipped.astype(jnp.float32)
            other_variables = jax.tree.map(
                partial(jnp.where, skipped), current.graphother, other_variables
            )
        new = new.replace(graphother=other_variables)
        if following is not None and current.reference is not None:
            moved = following.update_reference(current.reference, new.graphstate, new.step)
            new = new.replace(reference=moved)
        return tuple(jax.tree.leaves(new)), report

    out = (shardings, replicate_sharding(shardings[0]))
    options = _compiler_options(method.learner.config)
    compiled = jax.jit(step, donate_argnums=0, out_shardings=out, compiler_options=options)
    record, frozen = method.record, method.frozen
    parts = (record.loss, record.statistics, state.graphdef, state.tx, schedule, rows, seed)
    stored = StoredStep(
        compiled, run, method.learner.config, method.arguments, (*parts, *frozen.description)
    )
    return Step(stored, frozen.fixed, compute_totals)


def _compiler_options(config: ShardedConfig) -> dict[str, str]:
    """Return the options that keep barriers on one CPU.

    XLA removes barriers on CPUs. Then it merges the recomputation of a rematerialized layer with
    the forward pass, unless a scan separates the two, so that nothing is rematerialized.
    """
    devices = config.mesh.devices
    one_cpu = devices.size == 1 and devices.flat[0].platform == "cpu"
    return {"xla_disable_hlo_passes": "cse_barrier_expander"} if one_cpu else {}


def build_eval_step(state: EasyDeLState, method: MethodRun) -> EvalStep:
    """Compile the sums of one batch, without gradient and without randomness.

    Args:
        state: structure of the state.
        method: the loss and the frozen models.

    Returns:
        A function `(leaves, batch) -> (terms, metrics)`, `sums` and `metrics` of the loss. `leaves`
        are the leaves of `graphstate`, then of `graphother`, then of `reference`. The batch
        contains the method's statistics, if it has any.
    """
    compute_loss = _build_loss_function(state.graphdef, method.loss, method.frozen)

    def sums(*arguments: object) -> tuple[Metrics, Metrics]:
        loss = compute_loss(*arguments)
        return loss.sums, loss.metrics

    return _evaluating(state, method, sums)


def build_statistics_step(state: EasyDeLState, method: MethodRun) -> Step[Metrics]:
    """Compile the method's statistics of one batch; same arguments as `build_eval_step`."""
    function = _build_function(state.graphdef, method.statistics, method.frozen)
    return _evaluating(state, method, function)


def _evaluating(state: EasyDeLState, method: MethodRun, function: Callable[..., T]) -> Step[T]:
    # Only the structure: a reference to the arrays would keep donated buffers.
    treedef = jax.tree.structure((state.graphstate, state.graphother, state.reference))

    def step(leaves: Leaves, frozen: Leaves, batch: Batch) -> T:
        graphstate, graphother, reference = jax.tree.unflatten(treedef, leaves)
        frozen = method.frozen.join_leaves(frozen, reference)
        return function(graphstate, graphother, frozen, batch, None)

    compiled = jax.jit(step, out_shardings=replicate_sharding(state.step.sharding))
    return Step(compiled, method.frozen.fixed)


def _build_loss_function(
    graphdef: nnx.GraphDef, loss_fn: Callable[..., Loss], frozen: Frozen
) -> Callable[..., Loss]:
    function = _build_function(graphdef, loss_fn, frozen)
    return lambda *arguments: function(*arguments).validate_terms()


def _build_function(
    graphdef: nnx.GraphDef, function: Callable[..., T], frozen: Frozen
) -> Callable[..., T]:
    """Turn a function of models into `f(graphstate, graphother, frozen leaves, batch, key)`."""

    def call_with_arrays(
        graphstate: nnx.State,
        graphother: nnx.State,
        leaves: Leaves,
        batch: Batch,
        key: jax.Array | None,
    ) -> T:
        learner = nnx.merge(graphdef, graphstate, graphother)
        return function(Models(learner, frozen.merge(leaves)), batch, key)

    return call_with_arrays


def _tokens(batch: Batch) -> jax.Array:
    """Return the number of tokens of a batch over all processes, without padding."""
    segments = [batch[name] for name in ("segment_ids", "decoder_segment_ids") if name in batch]
    if segments:
        return sum(map(jnp.count_nonzero, segments), jnp.zeros((), jnp.int32))
    if "label_lengths" in batch:
        return jnp.sum(batch["label_lengths"])
    return jnp.asarray(batch["input_ids"].size if "input_ids" in batch else 0)


def _objective(sums: dict[str, Metric], totals: dict[str, jax.Array]) -> jax.Array:
    """Return the loss of a microbatch times the step's weight of the main term.

    The loss of a step is the sum of `sum / weight` over its terms, with sums and weights over all
    microbatches. The step divides by the weight of the main term once, at the end. Therefore the
    other terms are multiplied by that weight.

    Args:
        sums: the terms of the microbatch.
        totals: weight of each term over the whole step; empty if the step has one microbatch or the
            loss has one term.
    """
    objective = sums[MAIN].sum
    totals = totals or {name: jax.lax.stop_gradient(m.weight) for name, m in sums.items()}
    for name, metric in sums.items():
        if name != MAIN:
            share = jnp.maximum(totals[MAIN], _SMALLEST) / jnp.maximum(totals[name], _SMALLEST)
            objective = objective + metric.sum * share
    return objective


def _sum_parts(function: Callable[..., T], parts: tuple[jax.Array, Batch]) -> T:
    """Sum a function of a microbatch, which returns a tree of arrays, over stacked microbatches."""
    shapes = jax.eval_shape(function, *jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def body(sums: T, part: tuple[jax.Array, Batch]) -> tuple[T, None]:
        return jax.tree.map(jnp.add, sums, function(*part)), None

    return jax.lax.scan(body, zeros, parts)[0]
