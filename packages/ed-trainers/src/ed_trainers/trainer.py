"""`Trainer`: what all methods share. A method adds its loss and its batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
from ed_infra.errors import ConfigError, EasyDeLError, unknown_name
from ed_layers.quantization.model import dequantize, is_quantized
from ed_models.adapters.lora import has_lora, merge_lora
from ed_models.protocol import LanguageModel
from flax import nnx

from ed_trainers.batches import Dataset, Feed, HostBatch, Share
from ed_trainers.callbacks import Callback
from ed_trainers.contract import Batch, Frozen, Loss, Method, Models, Statistics
from ed_trainers.figures.metrics import RECORD
from ed_trainers.job import Job
from ed_trainers.optimizers import check_rules
from ed_trainers.options.base import TrainingArguments
from ed_trainers.placement import Placement, place_model
from ed_trainers.probes import Benchmark, probes_of
from ed_trainers.report import write_report
from ed_trainers.rollout import Weights
from ed_trainers.running.evaluation import Evaluator
from ed_trainers.running.loop import TrainingLoop
from ed_trainers.state import EasyDeLState
from ed_trainers.stored import disk
from ed_trainers.stored.processor import Saveable, with_length

#: Folder of a run that holds the adapters of its model, in PEFT's layout.
ADAPTER = "adapter"


@dataclass(frozen=True)
class TrainerOutput:
    """What training leaves behind.

    Attributes:
        state: parameters and optimizer state after the last step.
        metrics: of the last logged step `train_loss`, and `train_<name>` of the other progress
            columns of the method; `eval_loss` and the other figures of the last evaluation;
            `steps`, `seconds`, `tokens_per_second` of this process; what the seconds went into
            (`productive_seconds`, `compile_seconds`, ...) and `goodput`, the share of the first.
        checkpoint_path: newest checkpoint, if there is one.
        best_checkpoint_path: the one whose evaluation was best, if any was evaluated.
        save_directory: where everything is; the model, if it was saved, is in `model` under it.
        stopped_by: None when training ran to its end, else why it stopped ("SIGTERM", "SIGINT",
            "time limit", or what a callback said): it can go on from `checkpoint_path`.
    """

    state: EasyDeLState
    metrics: dict[str, float]
    checkpoint_path: Path | None
    save_directory: Path
    stopped_by: str | None = None
    best_checkpoint_path: Path | None = None


class Trainer(ABC):
    """Trains a model on batches.

    A method is a subclass: the class of its options, the names of the frozen models that its loss
    reads, `prepare` and `loss`.

    While it trains, each step overwrites the model's arrays. `model` always holds the present ones:
    ask for it again after a step instead of keeping what it held.

    Args:
        arguments: options of the method.
        model: a module, or an `EasyDeLState` of one; a state that has an optimizer is trained with
            it, and the optimizer's options in `arguments` are not read.
        train_dataset: a loader with `batch_at(step)`, or an iterable of batches with
            `state_dict()` and `load_state_dict(state)`.
        eval_dataset: a loader with `batch_at(step)` and `steps_per_epoch`, or an iterable.
        processing_class: tokenizer, saved beside the model.
        callbacks: hooks into the loop.
        frozen: the models that do not learn, by name; each on the mesh of the model. The model
            itself may be one of them: then it is kept as it is before training.
        benchmark: runs the argument `benchmarks`.

    Raises:
        ConfigError: an argument is of the wrong kind, a frozen model is missing or not wanted, or a
            rule over parameters matches none.
    """

    arguments_class: ClassVar[type[TrainingArguments]]
    #: Names of the frozen models that the loss reads.
    frozen_models: ClassVar[tuple[str, ...]] = ()
    #: Whether the method's own term of the loss is a mean over tokens, in nats: then an evaluation
    #: reports the perplexity.
    per_token: ClassVar[bool] = True
    #: Names of the figures that the terminal and the summary show, the most telling one first.
    progress_columns: ClassVar[tuple[str, ...]] = ("loss",)
    #: Means over a whole step or evaluation that the loss reads; see `Method.statistics`.
    statistics: Statistics | None = None

    def __init__(
        self,
        arguments: TrainingArguments,
        model: LanguageModel | EasyDeLState,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | None = None,
        processing_class: Saveable | None = None,
        *,
        callbacks: Iterable[Callback] = (),
        frozen: Mapping[str, LanguageModel] | None = None,
        benchmark: Benchmark | None = None,
    ):
        if not isinstance(arguments, self.arguments_class):
            raise ConfigError(
                f"{type(self).__name__} takes {self.arguments_class.__name__}, "
                f"not {type(arguments).__name__}"
            )
        self.arguments = arguments
        self._state = model if isinstance(model, EasyDeLState) else None
        self._model = model.model if isinstance(model, EasyDeLState) else model
        place_model(self._model)
        if self._state is not None and arguments.trainable_rules:
            raise ConfigError(
                "trainable_rules split a model, but a state says already what learns: give the "
                "rules to EasyDeLState.create(trainable=...), or the model to the trainer"
            )
        first = self._first_state()
        if first.tx is None:
            check_rules(arguments, first.graphstate)
        tracked = arguments.load_best_model_at_end or arguments.save_best_k
        if tracked and eval_dataset is None:
            raise ConfigError(
                "load_best_model_at_end and save_best_k compare evaluations: give an eval_dataset"
            )
        self._version = int(first.step)
        self.eval_dataset = eval_dataset
        self.processing_class = processing_class
        self.placement = Placement(self._model.config)
        self.callbacks = tuple(callbacks)
        self.method = Method(
            prepare=self.prepare,
            loss=self.loss,
            held_out=self.held_out,
            frozen=self._freeze(frozen or {}),
            per_token=self.per_token,
            statistics=self.statistics,
            whole_batches=self.whole_batches,
            progress_columns=self.progress_columns,
        )
        self.feed = None if train_dataset is None else self.feed_of(train_dataset)
        self.evaluator: Evaluator | None = None
        if eval_dataset is not None:
            rows = arguments.eval_batch_size
            self.evaluator = Evaluator(self.method, self.placement, eval_dataset, rows=rows)
        self._probes = probes_of(arguments, self._model, processing_class, eval_dataset, benchmark)
        self._loop: TrainingLoop | None = None

    @abstractmethod
    def prepare(self, batch: HostBatch) -> dict[str, np.ndarray]:
        """Turn a loader's batch into the arrays that `loss` reads, each [b, ...]; numpy only.

        Of several processes each prepares the rows of its own devices; see `whole_batches`.
        """

    @abstractmethod
    def loss(self, models: Models, batch: Batch, key: jax.Array | None) -> Loss:
        """Return the sums over a batch; see `ed_trainers.contract.LossFn`."""

    def held_out(
        self, batches: Iterable[HostBatch], state: EasyDeLState
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yield `prepare` of each held-out batch; see `Method.held_out`."""
        del state
        return map(self.prepare, batches)

    @property
    def whole_batches(self) -> bool:
        """Whether `prepare` looks beyond a row, or asks models: then each process reads all rows.

        Also where shapes follow from what is in the rows.
        """
        return False

    def feed_of(self, dataset: Dataset) -> Feed:
        """Return the training batches of a dataset, by step."""
        if self.whole_batches:
            return Feed(dataset)
        rows = self.arguments.total_batch_size // self.arguments.gradient_accumulation_steps
        return Feed(dataset, Share.of(dataset, self.placement, rows))

    @property
    def model(self) -> LanguageModel:
        """The model with its present weights; while training, the next step overwrites them.

        Raises:
            EasyDeLError: a step failed and took the weights with it.
        """
        self._refresh()
        return self._model

    @property
    def state(self) -> EasyDeLState | None:
        """The present state: of the running training, or the state that the trainer was made of.

        None for a trainer that was made of a module and is not training.
        """
        return self._state if self._loop is None else self._loop.alive_state() or self._state

    def weights(self) -> Weights:
        """The present weights, for a `Rollout`; they end when the next step begins."""
        weights = None if self._loop is None else self._loop.weights()
        if weights is None:
            self._refresh()
            weights = Weights(*self._model.split_module(), version=self._version)
        return weights

    @property
    def total_steps(self) -> int:
        """Updates of the whole run.

        Raises:
            ConfigError: neither the arguments nor the data say.
        """
        if self.arguments.max_training_steps is not None:
            return self.arguments.max_training_steps
        per_epoch = None if self.feed is None else self.feed.steps_per_epoch
        if per_epoch is None:
            raise ConfigError("train_dataset does not know its length: set max_training_steps")
        if per_epoch < 1:
            raise ConfigError("train_dataset has no full batch: give more data or a smaller batch")
        return per_epoch * self.arguments.num_train_epochs

    def train(self) -> TrainerOutput:
        """Train to the end, going on from the newest checkpoint if there is one.

        A signal, the time limit or a callback ends it early and cleanly: see
        `TrainerOutput.stopped_by`.

        Raises:
            ConfigError: there is no train_dataset, or its batches do not fit the arguments.
            CheckpointError: the checkpoints are of another run, or cannot be read.
            TrainingDiverged: the loss is not finite.
        """
        if self.feed is None:
            raise ConfigError("there is no train_dataset")
        self._loop = TrainingLoop(
            Job(
                arguments=self.arguments,
                total_steps=self.total_steps,
                feed=self.feed,
                method=self.method,
                placement=self.placement,
                evaluator=self.evaluator,
                probes=self._probes,
                begin=self._first_state,
                adopt=self.adopt,
                save_model=self.save_model,
                notify=self._notify,
            )
        )
        try:
            outcome = self._loop.run()
        finally:
            state = self._loop.alive_state()
            if state is not None:
                self.adopt(state)
            self._loop = None
        directory = Path(self.arguments.save_directory)
        if jax.process_index() == 0 and (directory / RECORD).is_file():
            _report(directory)
        return TrainerOutput(save_directory=directory, **outcome)

    def evaluate(self) -> dict[str, float]:
        """Return `eval_loss`, `eval_perplexity` and the other metrics over the held-out data.

        Means are over tokens, not over batches.

        Raises:
            ConfigError: there is no eval_dataset, or it is empty.
        """
        if self.evaluator is None:
            raise ConfigError("there is no eval_dataset")
        self._refresh()
        state = self.state or self._first_state()
        return self.evaluator.run(state.averaged() if self.arguments.use_ema else state)

    def adopt(self, state: EasyDeLState) -> None:
        """Let `model` hold the arrays of a state."""
        nnx.update(self._model, state.graphstate, state.graphother)
        self._version = int(state.step)
        if self._state is not None:
            self._state = state

    def stop(self, reason: str) -> None:
        """End the running training after the present step, with a checkpoint."""
        if self._loop is not None:
            self._loop.stop.ask(reason)

    def save_checkpoint(self) -> None:
        """Save a checkpoint of the running training after the present step, as SIGUSR1 does."""
        if self._loop is not None:
            self._loop.stop.ask_save()

    def save_model(self, directory: str | Path) -> None:
        """Write model and tokenizer in Hugging Face layout.

        Adapters are written to the folder `adapter` beside it, and merged into the model as the
        argument `merge_adapters` says; where they are not, they are all that is written.
        """
        model: Any = self.model
        directory = Path(directory)
        if has_lora(model):
            adapter = directory.parent / ADAPTER
            model.save_pretrained(adapter)
            merges = self.arguments.merge_adapters
            if not (not is_quantized(model) if merges is None else merges):
                return self._save_beside(adapter)
            if is_quantized(model):
                model = dequantize(model)
            model = merge_lora(model)
        model.save_pretrained(directory)
        self._save_beside(directory)

    def _save_beside(self, directory: Path) -> None:
        if self.processing_class is not None and jax.process_index() == 0:
            with_length(self.processing_class, self._model).save_pretrained(directory)

    def _first_state(self) -> EasyDeLState:
        return self._state or EasyDeLState.create(
            model=self._model, trainable=self.arguments.trainable_rules
        )

    def _refresh(self) -> None:
        """Let the model hold the arrays of the running training."""
        if self._loop is None or not self._loop.began:
            return
        state = self._loop.alive_state()
        if state is None:
            raise EasyDeLError(
                "a training step failed and took the model's arrays with it: load the newest "
                f"checkpoint in {self.arguments.save_directory}, or build the model again"
            )
        nnx.update(self._model, state.graphstate, state.graphother)

    def _notify(self, event: str, *values: object) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *values)

    def frozen_of(self, models: Mapping[str, LanguageModel]) -> Mapping[str, LanguageModel]:
        """Return the frozen models of the loss, from those that the trainer was called with.

        Raises:
            ConfigError: one is not wanted, or missing.
        """
        for name in models:
            if name not in self.frozen_models:
                raise unknown_name(
                    f"frozen model of {type(self).__name__}", name, self.frozen_models
                )
        for name in self.frozen_models:
            if name not in models:
                raise ConfigError(
                    f"{type(self).__name__} reads the frozen model {name!r}: "
                    f"give it as frozen={{{name!r}: model}}"
                )
        return models

    def on_mesh(self, name: str, model: LanguageModel) -> LanguageModel:
        """Return a frozen model, placed on the learner's mesh.

        Raises:
            ConfigError: it was made for another mesh.
        """
        mesh = self._model.config.mesh
        if model.config.mesh != mesh:
            raise ConfigError(
                f"the frozen model {name!r} is on the mesh {dict(model.config.mesh.shape)}, "
                f"the model on {dict(mesh.shape)}: one step reads both, so create it with the "
                "same sharding_axis_dims"
            )
        place_model(model)
        return model

    def _freeze(self, models: Mapping[str, LanguageModel]) -> Frozen:
        wanted = self.frozen_of(models)
        placed = {name: self.on_mesh(name, model) for name, model in wanted.items()}
        return Frozen(placed, self._model)


def _report(directory: Path) -> None:
    """Write the report of a run; where the disk is full, say so: the run itself is done."""
    try:
        write_report(directory)
    except OSError as error:
        if not disk.is_full(error):
            raise
        room = disk.room(directory, (directory / RECORD).stat().st_size)
        print(f"the report of {directory} could not be written: {room}", flush=True)
