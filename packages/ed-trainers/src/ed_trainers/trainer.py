"""`Trainer`: what all methods share. A method adds its loss and its batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.outputs import Metric
from flax import nnx

from ed_trainers.arguments import TrainingArguments
from ed_trainers.callbacks import Callback, CallbackList
from ed_trainers.evaluation import Evaluator
from ed_trainers.feed import Feed, HostBatch
from ed_trainers.loop import TrainingLoop
from ed_trainers.placement import Placement, place_model
from ed_trainers.state import EasyDeLState


@dataclass(frozen=True)
class TrainerOutput:
    """What training leaves behind.

    Attributes:
        state: parameters and optimizer state after the last step.
        metrics: `train_loss` (of the last logged step), `eval_loss` and the other figures of the
            last evaluation, `steps`, `seconds`, `tokens_per_second` of this process.
        checkpoint_path: newest checkpoint, if there is one.
        save_directory: where everything is; the model, if it was saved, is in `model` under it.
        stopped_by: None when training ran to its end, else why it stopped ("SIGTERM", "SIGINT",
            "time limit", or what a callback said): it can go on from `checkpoint_path`.
    """

    state: EasyDeLState
    metrics: dict[str, float]
    checkpoint_path: Path | None
    save_directory: Path
    stopped_by: str | None = None


class Trainer(ABC):
    """Trains a model on batches.

    While it trains, the model's arrays belong to the trainer (each step overwrites them); when
    training ends, `model` holds the trained parameters.

    Args:
        arguments: options of the method.
        model: a module, or an `EasyDeLState` of one; a state that has an optimizer is trained with
            it, and the optimizer's options in `arguments` are not read.
        train_dataset: a loader with `batch_at(step)`, or an iterable of batches with
            `state_dict()` and `load_state_dict(state)`.
        eval_dataset: a loader with `batch_at(step)` and `steps_per_epoch`, or an iterable.
        processing_class: tokenizer, saved beside the model.
        callbacks: hooks into the loop.

    Raises:
        ConfigError: an argument is of the wrong kind, or the length of training is not known.
    """

    arguments_class: ClassVar[type[TrainingArguments]]

    def __init__(
        self,
        arguments: TrainingArguments,
        model: Any,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        callbacks: Iterable[Callback] = (),
    ):
        if not isinstance(arguments, self.arguments_class):
            raise ConfigError(
                f"{type(self).__name__} takes {self.arguments_class.__name__}, "
                f"not {type(arguments).__name__}"
            )
        self.arguments = arguments
        self.state = model if isinstance(model, EasyDeLState) else None
        self.model = model.model if isinstance(model, EasyDeLState) else model
        place_model(self.model)
        self.feed = None if train_dataset is None else Feed(train_dataset)
        self.eval_dataset = eval_dataset
        self.processing_class = processing_class
        self.placement = Placement(self.model.config)
        self.callbacks = CallbackList(callbacks)
        self.evaluator = None if eval_dataset is None else Evaluator(self)
        self._loop: TrainingLoop | None = None

    @abstractmethod
    def prepare(self, batch: HostBatch) -> dict[str, np.ndarray]:
        """Turn a loader's batch into the arrays that `loss` reads, each [b, ...]; numpy only."""

    @abstractmethod
    def loss(
        self, model: Any, batch: Mapping[str, jax.Array], key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, Metric]]:
        """Return the summed loss and the metrics; see `ed_trainers.step.LossFn`."""

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
        self._loop = TrainingLoop(self, self.feed)
        try:
            outcome = self._loop.run()
        finally:
            state = self._loop.alive_state()
            if state is not None:
                self.adopt(state)
            self._loop = None
        directory = Path(self.arguments.save_directory)
        return TrainerOutput(save_directory=directory, **outcome)

    def evaluate(self) -> dict[str, float]:
        """Return `eval_loss`, `eval_perplexity` and the other metrics over the held-out data.

        Means are over tokens, not over batches.

        Raises:
            ConfigError: there is no eval_dataset, or it is empty.
        """
        if self.evaluator is None:
            raise ConfigError("there is no eval_dataset")
        return self.evaluator.run(EasyDeLState.create(model=self.model))

    def adopt(self, state: EasyDeLState) -> None:
        """Let `model` hold the arrays of a state."""
        nnx.update(self.model, state.graphstate, state.graphother)
        if self.state is not None:
            self.state = state

    def stop(self, reason: str) -> None:
        """End the running training after the present step, with a checkpoint."""
        if self._loop is not None:
            self._loop.stop.ask(reason)

    def save_model(self, directory: str | Path) -> None:
        """Write model and tokenizer in Hugging Face layout."""
        self.model.save_pretrained(directory)
        if self.processing_class is not None and jax.process_index() == 0:
            self.processing_class.save_pretrained(directory)
