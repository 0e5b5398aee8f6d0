"""What a method is to the machinery: a batch, a loss over models, and models that do not learn.

Legend: b rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError, unknown_name
from ed_infra.outputs import Metric
from ed_models.adapters.lora import has_lora, remove_lora
from ed_models.protocol import LanguageModel
from flax import nnx

from ed_trainers.batches import HostBatch
from ed_trainers.roles.frozen import Following
from ed_trainers.state import EasyDeLState

Batch = Mapping[str, jax.Array]
Number = TypeVar("Number", float, jax.Array)

#: Name of the method's own term of the loss.
MAIN = "main_loss"
#: Names of a report that no term of the loss and no metric may take.
RESERVED = (
    "loss",
    "step",
    "weight",
    "learning_rate",
    "grad_norm",
    "skipped",
    "tokens",
    "tokens_per_second",
    "time",
)


@dataclass(frozen=True)
class Models:
    """The models of a loss.

    Attributes:
        learner: the one that is trained.
        frozen: the others by name ("reference", "teacher", "reward"); `models["reference"]`. A
            learner with adapters is its own reference where there is no other: the base under
            them, without a second copy of the weights.
    """

    learner: LanguageModel
    frozen: Mapping[str, LanguageModel] = field(default_factory=dict)

    def __getitem__(self, name: str) -> LanguageModel:
        if name in self.frozen:
            return self.frozen[name]
        if name == "reference" and has_lora(self.learner):
            return cast(LanguageModel, remove_lora(cast(nnx.Module, self.learner)))
        raise unknown_name("frozen model", name, self.frozen)


class Reporting(Protocol):
    """The output of a forward pass, for what the layers report in it."""

    @property
    def losses(self) -> dict[str, Metric]:
        """What the layers add to the loss."""
        ...

    @property
    def aux(self) -> dict[str, Metric]:
        """Statistics of the layers."""
        ...

    @property
    def updates(self) -> dict[str, jax.Array]:
        """Of variables that change without a gradient."""
        ...


class Loss(NamedTuple):
    """What a batch adds to a step: sums, not means, so that microbatches add up exactly.

    The step minimizes the sum of the means in `sums`: each sum is divided by its own weight over
    all microbatches. `logged` says under which names the means are logged.

    Attributes:
        sums: the terms of the loss by name, coefficients included: `"main_loss"`, the method's own
            term, further terms of the method, and the auxiliary losses of the layers.
        metrics: for the log alone.
        updates: of variables that change without a gradient (`ed_layers.updated`); the step adds
            them up over its microbatches and applies them once. An evaluation ignores them.
    """

    sums: dict[str, Metric]
    metrics: dict[str, Metric]
    updates: dict[str, jax.Array]

    @classmethod
    def of(cls, output: Reporting, total: jax.Array, weight: jax.Array, **metrics: Metric) -> Loss:
        """Join the method's own term with the reports of the layers.

        Args:
            output: of the learner.
            total: the method's own term, summed over the batch.
            weight: the divisor of `total`, summed over the batch.
            metrics: the method's own figures.
        """
        sums = {MAIN: Metric.of(total, weight), **output.losses}
        return cls(sums, {**output.aux, **metrics}, output.updates)

    def checked(self) -> Loss:
        """Return the loss itself; called while tracing.

        Raises:
            ConfigError: `sums` lacks `"main_loss"`, a name is taken twice, or a figure is no
                scalar.
        """
        if MAIN not in self.sums:
            raise ConfigError(
                f"sums has no {MAIN!r}, only {', '.join(self.sums) or 'nothing'}: make the loss "
                "with Loss.of(output, total, weight)"
            )
        for name in [*self.sums, *self.metrics]:
            if name in RESERVED or (name in self.sums and name in self.metrics):
                raise ConfigError(f"{name!r} is the name of another figure: rename the metric")
        for name, metric in {**self.sums, **self.metrics}.items():
            shapes = jnp.shape(metric.sum), jnp.shape(metric.weight)
            if shapes != ((), ()):
                raise ConfigError(
                    f"the sum and the weight of {name!r} have the shapes {shapes[0]} and "
                    f"{shapes[1]}: both must be scalars"
                )
        return self


def logged(terms: Mapping[str, Number], metrics: Mapping[str, Number]) -> dict[str, Number]:
    """Return the figures of the log, from the means of `Loss.sums` and of `Loss.metrics`.

    `loss` is the optimized total. Where the total has several terms, each is logged too.
    """
    total = sum(terms.values())
    return {"loss": total, **(terms if len(terms) > 1 else {}), **metrics}  # type: ignore[dict-item]


class LossFn(Protocol):
    """A method's loss; traced, so a function of its arguments alone."""

    def __call__(self, models: Models, batch: Batch, key: jax.Array | None) -> Loss:
        """Return the sums over a batch.

        Args:
            models: the learner and the frozen models.
            batch: the arrays of `prepare`, on the devices, [b, ...].
            key: randomness of this microbatch; None means deterministic (evaluation).
        """
        ...


class Statistics(Protocol):
    """Means over a whole step that its loss reads, as of a microbatch; traced."""

    def __call__(self, models: Models, batch: Batch, key: jax.Array | None) -> dict[str, Metric]:
        """Return what a batch adds to each; no gradient goes through them."""
        ...


class HeldOut(Protocol):
    """Turns the held-out batches of a loader into arrays."""

    def __call__(
        self, batches: Iterable[HostBatch], state: EasyDeLState
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yield the arrays that the loss reads, each [b, ...], batch by batch.

        Args:
            batches: one whole pass over the held-out data.
            state: the state that is evaluated.
        """
        ...


class Frozen:
    """Models that do not learn, taken apart: compiled steps get their leaves as arguments.

    Args:
        models: by name.
        learner: the model that is trained. Steps overwrite its arrays, so an array that a frozen
            model shares with it (a reference that is the learner itself) is copied.
        following: says which of them follows the learner, if one does. Its weights that move are
            in the state, not here.
    """

    def __init__(
        self,
        models: Mapping[str, LanguageModel] | None = None,
        learner: LanguageModel | None = None,
        following: Following | None = None,
    ):
        self.following = following
        self._graphdefs: dict[str, nnx.GraphDef] = {}
        parts: dict[str, tuple[nnx.State, nnx.State]] = {}
        for name, model in (models or {}).items():
            self._graphdefs[name], params, other = model.split_module()
            if following is not None and name == following.name:
                params = _without(params, following.paths)
            parts[name] = (params, other)
        overwritten: set[int] = set()
        if parts and learner is not None:
            overwritten = _buffers(jax.tree.leaves(learner.split_module()[1:]))
        leaves, self._treedef = jax.tree.flatten(parts)
        #: The arrays of the models that no step changes.
        self.fixed: tuple[jax.Array, ...] = tuple(
            jnp.copy(leaf) if overwritten and overwritten & _buffers([leaf]) else leaf
            for leaf in leaves
        )

    @property
    def leaves(self) -> tuple[jax.Array, ...]:
        """All arrays of the models as they are now, in the order that `merge` wants."""
        return self.joined(self.fixed, None if self.following is None else self.following.present())

    def joined(
        self, fixed: tuple[jax.Array, ...], reference: nnx.State | None
    ) -> tuple[jax.Array, ...]:
        """Return what `merge` wants, of `fixed` and of the weights that follow the learner."""
        return (*fixed, *jax.tree.leaves(reference))

    def merge(self, leaves: tuple[jax.Array, ...]) -> dict[str, LanguageModel]:
        """Return the models with these leaves; while tracing."""
        count = self._treedef.num_leaves
        parts = jax.tree.unflatten(self._treedef, leaves[:count])
        if self.following is not None:
            parts[self.following.name] += (self.following.state_of(leaves[count:]),)
        return {
            name: nnx.merge(graphdef, *parts[name]) for name, graphdef in self._graphdefs.items()
        }


def _without(params: nnx.State, paths: Container[object]) -> nnx.State:
    kept = [(path, variable) for path, variable in nnx.to_flat_state(params) if path not in paths]
    return nnx.from_flat_state(kept)


def _buffers(leaves: list[jax.Array]) -> set[int]:
    """Addresses of the memory that arrays occupy here."""
    return {
        shard.data.unsafe_buffer_pointer() for leaf in leaves for shard in leaf.addressable_shards
    }


@dataclass(frozen=True)
class Method:
    """A method as the loop and the evaluation see it.

    Attributes:
        prepare: turns a loader's batch into numpy arrays [b, ...].
        loss: of such a batch, on the devices.
        held_out: `prepare` of one pass over the held-out batches.
        frozen: the models that do not learn.
        per_token: whether the method's own term is a mean over tokens, in nats.
        statistics: means that the loss reads, over the whole step or the whole evaluation. They
            are in its batch by name; a batch without them is a whole step.
        whole_batches: whether `prepare` looks beyond a row, so that each process must read all.
        progress_columns: names of the figures that the terminal and the summary show.
    """

    prepare: Callable[[HostBatch], dict[str, np.ndarray]]
    loss: LossFn
    held_out: HeldOut
    frozen: Frozen = field(default_factory=Frozen)
    per_token: bool = True
    statistics: Statistics | None = None
    whole_batches: bool = False
    progress_columns: tuple[str, ...] = ("loss",)
