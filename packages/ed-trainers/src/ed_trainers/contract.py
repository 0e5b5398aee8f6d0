"""A training method is a record of functions, `Method`; `MethodRun` is a method within one run.

Legend: b rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError, unknown_name
from ed_infra.inputs import Inputs
from ed_infra.outputs import Metric
from ed_layers.dropout import disable_dropout
from ed_models.adapters.lora import has_lora, remove_lora
from ed_models.protocol import LanguageModel
from flax import nnx

from ed_trainers.batches import Dataset, Feed, HostBatch
from ed_trainers.environments.tools import ToolSet
from ed_trainers.options.base import TrainingArguments
from ed_trainers.placement import Placement
from ed_trainers.rewards import RewardFunction
from ed_trainers.roles.extension import Extension
from ed_trainers.roles.frozen import Following, Frozen
from ed_trainers.rollout import Rollout, Weights
from ed_trainers.state import EasyDeLState

Prepared = Inputs[np.ndarray]
Batch = Inputs[jax.Array]
Number = TypeVar("Number", float, jax.Array)
A = TypeVar("A", bound=TrainingArguments, covariant=True)
R = TypeVar("R", bound="MethodRun")

#: Name of the method's own term of the loss.
MAIN = "main_loss"
#: Names of a report that no term of the loss and no metric may use.
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
    """The models that a loss reads.

    Attributes:
        learner: the trained model.
        frozen: the other models by role ("reference", "teacher", "reward"); `models["reference"]`.
            A learner with adapters and without another reference is its own reference: the base
            under the adapters, without a second copy of the weights.
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
    """An output of a forward pass, with the reports of the layers."""

    @property
    def losses(self) -> dict[str, Metric]:
        """Auxiliary losses of the layers."""
        ...

    @property
    def aux(self) -> dict[str, Metric]:
        """Statistics of the layers."""
        ...

    @property
    def updates(self) -> dict[str, jax.Array]:
        """Sums for variables that change without a gradient."""
        ...


class Loss(NamedTuple):
    """The contribution of a batch to a step: sums, so that microbatches add up exactly.

    The step minimizes the sum of the means in `sums`: each sum is divided by its own weight over
    all microbatches. `build_log_metrics` names the logged means.

    Attributes:
        sums: the terms of the loss by name, coefficients included: `"main_loss"`, the method's own
            term, further terms of the method, and the auxiliary losses of the layers.
        metrics: figures for the log only.
        updates: sums for variables that change without a gradient (`ed_layers.updated`); the step
            adds them over its microbatches and applies them once. An evaluation ignores them.
    """

    sums: dict[str, Metric]
    metrics: dict[str, Metric]
    updates: dict[str, jax.Array]

    @classmethod
    def of(cls, output: Reporting, total: jax.Array, weight: jax.Array, **metrics: Metric) -> Loss:
        """Join the method's own term with the reports of the layers.

        Args:
            output: the output of the learner.
            total: the method's own term, summed over the batch.
            weight: the divisor of `total`, summed over the batch.
            metrics: the method's own figures.
        """
        sums = {MAIN: Metric.of(total, weight), **output.losses}
        return cls(sums, {**output.aux, **metrics}, output.updates)

    def validate_terms(self) -> Loss:
        """Return the loss if it is valid; called while tracing.

        Raises:
            ConfigError: `sums` lacks `"main_loss"`, two figures have one name, or a figure is not a
                scalar.
        """
        if MAIN not in self.sums:
            raise ConfigError(
                f"sums has no {MAIN!r}, only {', '.join(self.sums) or 'nothing'}: create the loss "
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


def build_log_metrics(
    terms: Mapping[str, Number], metrics: Mapping[str, Number]
) -> dict[str, Number]:
    """Return the figures of the log from the means of `Loss.sums` and of `Loss.metrics`.

    `loss` is the optimized total. If the total has several terms, each term is logged too.
    """
    total = sum(terms.values())
    return {"loss": total, **(terms if len(terms) > 1 else {}), **metrics}  # type: ignore[dict-item]


class RunData(NamedTuple):
    """The data of a run, for a method that reads them before training.

    Attributes:
        train, evaluation: the datasets; None if the trainer has none.
        total_steps: number of updates of the whole run.
        state: the state before training.
    """

    train: Dataset | None
    evaluation: Dataset | None
    total_steps: int
    state: EasyDeLState


class FeaturesOfImages(Protocol):
    """A function that replaces the images of prepared batches by features."""

    #: Number of images that the encoder computed since the start.
    encoded: int

    def __call__(self, batch: Prepared, /) -> Prepared:
        """Return the batch with features instead of images."""
        ...


@dataclass(eq=False)
class MethodRun(Generic[A]):
    """A method in one run: its options, models and objects, and its functions bound to them.

    A method with objects of its own has a subclass: its fields are the objects, and `create_parts`
    creates them.

    Attributes:
        name: the name of the trainer, for messages.
        record: the functions of the method.
        arguments: the options.
        learner: the trained module; while training, its arrays are out of date.
        placement: puts arrays on the devices.
        tokenizer: the trainer's `processing_class`.
        rollout: completes prompts, for methods that sample.
        reward_functions: functions passed to the trainer, in place of those that the options name.
        reward_folders: folders in which named functions are searched.
        tools: the tools of a method that samples; None: none.
        weights: returns the learner's present weights.
        learned: returns the parameters that are trained, without those of an extension.
        present_reference: returns the present weights of a synchronized reference.
        following: the synchronized frozen model, set by the part that synchronizes it.
        images: replaces the images of prepared batches by features, see `image_feature_cache_gib`.
        frozen: the models that are not trained, as the compiled steps receive them.
    """

    name: str
    record: Method
    arguments: A
    learner: LanguageModel
    placement: Placement = field(kw_only=True)
    weights: Callable[[], Weights] = field(kw_only=True)
    learned: Callable[[], nnx.State] = field(kw_only=True)
    present_reference: Callable[[], nnx.State] = field(kw_only=True)
    tokenizer: object | None = field(kw_only=True, default=None)
    rollout: Rollout | None = field(kw_only=True, default=None)
    reward_functions: Sequence[RewardFunction] = field(kw_only=True, default=())
    reward_folders: Sequence[str | Path] = field(kw_only=True, default=())
    tools: ToolSet | None = field(kw_only=True, default=None)
    frozen: Frozen = field(init=False)
    following: Following | None = field(init=False, default=None)
    images: FeaturesOfImages | None = field(init=False, default=None)

    def bind(self, models: Mapping[str, LanguageModel]) -> None:
        """Create the method's objects, and place the frozen models on the learner's mesh.

        Args:
            models: the frozen models by role.

        Raises:
            ConfigError: a model was created for another mesh, or a part rejects the models.
        """
        frozen_models = dict(models)
        self.create_parts(frozen_models)
        placed = {role: self.placement.frozen(role, model) for role, model in frozen_models.items()}
        self.frozen = Frozen(placed, self.learner, self.following)

    def create_parts(self, models: dict[str, LanguageModel]) -> None:
        """Create the method's objects.

        Args:
            models: the frozen models by role; the objects may add and remove models.
        """

    @property
    def rows(self) -> int:
        """Rows of a microbatch."""
        arguments = self.arguments
        return arguments.sequences_per_step // arguments.gradient_accumulation_steps

    @property
    def whole_batches(self) -> bool:
        """Whether `prepare` needs the rows of all processes."""
        requirement = self.record.whole_batches
        return requirement if isinstance(requirement, bool) else requirement(self)

    def prepare(self, batch: HostBatch) -> Prepared:
        """Return the arrays that `loss` reads; see `Method.prepare`."""
        return self.with_features(self.record.prepare(self, batch))

    def with_features(self, prepared: Prepared) -> Prepared:
        """Return a batch with features instead of images, if the run keeps features."""
        return prepared if self.images is None else self.images(prepared)

    @property
    def figures(self) -> Mapping[str, float]:
        """Figures of the prepared batches, for the log."""
        return {} if self.images is None else {"encoded_images": self.images.encoded}

    def observe(self, report: Mapping[str, jax.Array]) -> None:
        """Receive the figures of a step, which are still on the devices, before the next step."""

    def state_dict(self) -> dict[str, object]:
        """Return the values of the method that change from step to step, for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue with the values of a checkpoint; empty for a checkpoint without them."""

    def held_out(self, batches: Iterable[HostBatch], state: EasyDeLState) -> Iterator[Prepared]:
        """Yield the prepared batches of one pass over held-out data."""
        if self.record.held_out is None:
            return map(self.prepare, batches)
        return map(self.with_features, self.record.held_out(self, batches, state))

    def loss(self, models: Models, batch: Batch, key: jax.Array | None) -> Loss:
        """Return the sums over a batch; see `Method.loss`."""
        with disable_dropout(self.arguments.disable_dropout):
            return self.record.loss(self, models, batch, key)

    def statistics(self, models: Models, batch: Batch, key: jax.Array | None) -> dict[str, Metric]:
        """Return the statistics of a batch; empty for a method without statistics."""
        if self.record.statistics is None:
            return {}
        with disable_dropout(self.arguments.disable_dropout):
            return self.record.statistics(self, models, batch, key)


@dataclass(frozen=True)
class Method(Generic[R]):
    """A training method: functions of a run. Every function gets the run first.

    Attributes:
        prepare: returns the arrays that `loss` reads from a loader's batch, each with the axis
            `batch` first; numpy only.
        loss: returns the sums over a batch; traced, so a pure function of its arguments. The key is
            None in an evaluation, which is deterministic.
        statistics: returns means that the loss reads over the whole step or the whole evaluation;
            the loss finds them in its batch by name. A batch without them is a whole step. No
            gradient flows through them; traced.
        held_out: yields the prepared batches of one pass over held-out data; default: `prepare` of
            each.
        measure: returns further figures of one pass over the held-out batches, computed on the
            host, such as error rates of transcripts; called with the whole batches on every
            process.
        feed: returns the training batches of a dataset; default: the rows of this process.
        before_training: runs once before the first step of `train`.
        run: the class of the run. A method with objects of its own has a subclass of `MethodRun`,
            whose fields are these objects.
        whole_batches: whether `prepare` needs the rows of all processes.
        per_token: whether the method's own term is a mean over tokens, in nats. If so, an
            evaluation reports the perplexity.
        progress_columns: names of the figures in the terminal and in the summary.
        extension: variables that are trained together with the model.
    """

    prepare: Callable[[R, HostBatch], Prepared]
    loss: Callable[[R, Models, Batch, jax.Array | None], Loss]
    statistics: Callable[[R, Models, Batch, jax.Array | None], dict[str, Metric]] | None = None
    held_out: Callable[[R, Iterable[HostBatch], EasyDeLState], Iterator[Prepared]] | None = None
    measure: Callable[[R, Iterable[HostBatch], EasyDeLState], dict[str, float]] | None = None
    feed: Callable[[R, Dataset], Feed] | None = None
    before_training: Callable[[R, RunData], None] | None = None
    run: type[MethodRun] = MethodRun
    whole_batches: bool | Callable[[R], bool] = False
    per_token: bool = True
    progress_columns: tuple[str, ...] = ("loss",)
    extension: Extension | None = None
