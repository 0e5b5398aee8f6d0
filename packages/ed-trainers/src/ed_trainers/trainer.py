"""`Trainer`: trains a model with any method; a method is a record of functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Unpack, cast

import jax
import orbax.checkpoint as ocp
from ed_infra.distributed import from_main
from ed_infra.errors import ConfigError, EasyDeLError, unknown_name
from ed_layers.quantization.model import dequantize, is_quantized, simulate_in_place
from ed_models.adapters.lora import has_lora, merge_lora
from ed_models.checkpoints.model_card import write_card
from ed_models.checkpoints.tokenizers import Saveable, with_length
from ed_models.protocol import LanguageModel
from flax import nnx

from ed_trainers.arguments import REWARD_ROLE, MethodEntry
from ed_trainers.batches import Dataset, Epochs, Feed, HostBatch, Share
from ed_trainers.callbacks import Callback
from ed_trainers.checkpoints.run_lock import RunLock
from ed_trainers.contract import Batch, Loss, Method, Models, Prepared, RunData
from ed_trainers.environments.tools import ToolSet
from ed_trainers.figures.metrics import RECORD
from ed_trainers.given import Collator, GivenRow, OtherNames, merge_names, prepare_datasets
from ed_trainers.optimizers import build_optimizer, build_schedule, check_rules
from ed_trainers.options.base import TrainingArguments
from ed_trainers.placement import Placement, place_model
from ed_trainers.probes import Benchmark, LogWatcher, build_probes
from ed_trainers.report import PAGE, write_report
from ed_trainers.rewards import RewardFunction
from ed_trainers.rollout import AheadRollout, Rollout, Weights
from ed_trainers.running.evaluation import Evaluator
from ed_trainers.running.image_features import ImageFeatures
from ed_trainers.running.loop import Job, TrainingLoop
from ed_trainers.state import EasyDeLState, select_parameters
from ed_trainers.stored import disk

#: Folder of a run with the adapters of its model, in PEFT's layout.
ADAPTER = "adapter"


@dataclass(frozen=True)
class TrainerOutput:
    """The result of training.

    Attributes:
        state: parameters and optimizer state after the last step.
        metrics: `train_loss` of the last logged step, and `train_<name>` of the method's other
            progress columns; `eval_loss` and the other figures of the last evaluation; `steps`,
            `seconds`, `tokens_per_second` of this process; the parts of the seconds
            (`productive_seconds`, `compile_seconds`, ...) and `goodput`, the productive share.
        checkpoint_path: the newest checkpoint, if any.
        best_checkpoint_path: the checkpoint with the best evaluation, if any was evaluated.
        save_directory: the directory of the run; a saved model is in its folder `model`.
        stopped_by: None if training reached its end, else the reason to stop ("SIGTERM", "SIGINT",
            "time limit", or the reason of a callback). Training can resume from `checkpoint_path`.
        trained_steps: number of updates of this call; 0 if the run had finished before.
    """

    state: EasyDeLState
    metrics: dict[str, float]
    checkpoint_path: Path | None
    save_directory: Path
    stopped_by: str | None = None
    best_checkpoint_path: Path | None = None
    trained_steps: int = 0


#: Milliseconds in which all processes must have created their model.
_MEETING = 1_800_000


class Trainer:
    """Trains a model with a method.

    A method is a record of functions, see `ed_trainers.contract.Method`; a subclass only names the
    record and its entry. While training, each step overwrites the model's arrays. `model` always
    has the present arrays: read the property again after a step.

    Args:
        arguments: options of the method.
        model: a module, or an `EasyDeLState` of a module. A state with an optimizer is trained with
            that optimizer, and the optimizer options in `arguments` are ignored.
        train_dataset: a loader with `batch_at(step)`, or an iterable of batches with
            `state_dict()` and `load_state_dict(state)`. Rows (`datasets.Dataset`,
            `IterableDataset`, a list of texts or mappings) are prepared as a run file with the
            same options prepares them, with `ed-elarge`.
        eval_dataset: a loader with `batch_at(step)` and `steps_per_epoch`, an iterable, or rows.
        processing_class: tokenizer, saved with the model; it encodes rows.
        callbacks: functions that run at events of the loop.
        frozen: the models that are not trained, by role, on the mesh of the model. The model itself
            may be one of them: then the method reads it as it was before training.
        benchmark: runs the tasks of the argument `benchmarks`.
        watchers: functions of parameters whose values are logged.
        rollout: completes prompts; only for methods that sample.
        reward_functions: reward functions in place of those that the arguments name; only for
            methods with rewards.
        reward_folders: folders in which the files and modules of named reward functions and of an
            environment are searched before the working directory.
        tools: functions that the model may call; only for methods that sample, with a dataset of
            rows. With batches, a `ToolSet`, whose schemas the prompts contain.
        settings: values outside of the arguments that determine the result, by key, such as the
            name of the model. Checkpoints record them, and a run that resumes compares them.
        data_collator: converts the rows of a batch to arrays; the rows are then not prepared.
        others: arguments under the names of EasyDeL and TRL, see
            `ed_trainers.given.ARGUMENT_NAMES`.

    Raises:
        ConfigError: an argument has the wrong class, a frozen model is missing or not read, a
            method without rewards or sampling gets their arguments, or a rule over parameters
            matches no parameter.
    """

    #: The registered method: options, roles and data.
    entry: ClassVar[MethodEntry]
    #: The functions of the method.
    record: ClassVar[Method]

    def __init__(
        self,
        arguments: TrainingArguments | None = None,
        model: LanguageModel | EasyDeLState | None = None,
        train_dataset: Dataset | Iterable[GivenRow] | None = None,
        eval_dataset: Dataset | Iterable[GivenRow] | None = None,
        processing_class: Saveable | None = None,
        *,
        callbacks: Iterable[Callback] = (),
        frozen: Mapping[str, LanguageModel] | None = None,
        benchmark: Benchmark | None = None,
        watchers: Iterable[LogWatcher] = (),
        rollout: Rollout | None = None,
        reward_functions: Sequence[RewardFunction] = (),
        reward_folders: Sequence[str | Path] = (),
        tools: ToolSet | Sequence[Callable[..., object]] | None = None,
        settings: Mapping[str, Any] | None = None,
        data_collator: Collator | None = None,
        **others: Unpack[OtherNames],
    ):
        name = type(self).__name__
        if others or callable(reward_functions):
            given = merge_names(
                {
                    "arguments": arguments,
                    "model": model,
                    "train_dataset": train_dataset,
                    "eval_dataset": eval_dataset,
                    "processing_class": processing_class,
                    "frozen": frozen,
                    "reward_functions": reward_functions,
                },
                others,
            )
            arguments, model, frozen = given["arguments"], given["model"], given["frozen"]
            train_dataset, eval_dataset = given["train_dataset"], given["eval_dataset"]
            processing_class = given["processing_class"]
            reward_functions = given["reward_functions"]
        if not isinstance(arguments, self.entry.arguments):
            raise ConfigError(
                f"{name} requires {self.entry.arguments.__name__}, not {type(arguments).__name__}"
            )
        if model is None:
            raise ConfigError(f"{name} trains a model: pass it as model")
        datasets = (train_dataset, eval_dataset)
        if tools and not self.entry.samples:
            raise ConfigError(f"{name} does not sample completions: omit tools")
        functions = () if tools is None or isinstance(tools, ToolSet) else tuple(tools)
        prepared = prepare_datasets(
            arguments, model, processing_class, datasets, data_collator, functions
        )
        train_dataset, eval_dataset = prepared.train, prepared.evaluation
        rollout = prepared.rollout if rollout is None else rollout
        extension = self.record.extension
        if extension is not None:
            if isinstance(model, EasyDeLState):
                raise ConfigError(
                    f"{name} trains variables in addition to the model: pass the model, not a state"
                )
            model = extension.attach(model, arguments)
        if rollout is not None and not self.entry.samples:
            raise ConfigError(f"{name} does not sample completions: omit rollout")
        rewarded = any(role.name == REWARD_ROLE.name for role in self.entry.roles)
        if reward_functions and not rewarded:
            raise ConfigError(f"{name} reads no rewards: omit reward_functions")
        self.arguments = arguments
        self.settings = settings
        self._state = model if isinstance(model, EasyDeLState) else None
        self._model = model.model if isinstance(model, EasyDeLState) else model
        # On CPUs, the first collective waits only 30 seconds for a process that still compiles:
        # jax keeps the programs of process 0 alone.
        ocp.multihost.get_barrier_sync_fn()(key="trainer", timeout_ms=_MEETING)
        place_model(self._model)
        if self._state is not None and arguments.trained_parameters:
            raise ConfigError(
                "trainable_rules and frozen_parameters select the trained parameters of a model, "
                "and a state has them selected: pass rules to EasyDeLState.create(trainable=...), "
                "or the model to the trainer"
            )
        if arguments.simulated_format is not None:
            if self._state is not None:
                raise ConfigError(
                    "quantization_mode changes how a model reads its matrices, and a state has "
                    'them already: create the state from model.quantize({"dtype": ..., '
                    '"simulate": True}), or pass the model to the trainer'
                )
            simulate_in_place(cast(nnx.Module, self._model), arguments.simulated_format)
        # Weights of a synchronized reference for a trainer without a state.
        self._reference: nnx.State | None = None
        first = self._first_state()
        if first.tx is None:
            check_rules(arguments, first.graphstate)
        tracked = arguments.load_best_model_at_end or arguments.save_best_k
        if tracked and eval_dataset is None:
            raise ConfigError(
                "load_best_model_at_end and save_best_k compare evaluations: pass an eval_dataset"
            )
        self._version = int(first.step)
        self.eval_dataset = eval_dataset
        self.processing_class = processing_class
        self.placement = Placement(self._model.config)
        self.callbacks = tuple(callbacks)
        #: The method in this run; compiled steps read its loss and its frozen models.
        self.method = self.record.run(
            name,
            self.record,
            arguments,
            self._model,
            placement=self.placement,
            weights=self.weights,
            learned=self._get_learned_params,
            present_reference=self._present_reference,
            tokenizer=processing_class,
            rollout=rollout,
            reward_functions=tuple(reward_functions),
            reward_folders=tuple(reward_folders),
            tools=tools if isinstance(tools, ToolSet) else prepared.tools,
        )
        self.method.bind(self._checked_roles(frozen or {}))
        if self.method.following is not None:
            self._reference = self.method.following.begin
            if self._state is not None:
                self._state = self._with_reference(self._state)
        if arguments.image_feature_cache_gib is not None:
            frozen_models = self.method.frozen.merge(self.method.frozen.leaves)
            most = int(arguments.image_feature_cache_gib * 2**30)
            self.method.images = ImageFeatures(
                self._model, first, frozen_models, self.weights, most
            )
        self.feed = None if train_dataset is None else self._build_feed(train_dataset)
        self.evaluator: Evaluator | None = None
        if eval_dataset is not None:
            self.evaluator = Evaluator(
                self.method,
                self.placement,
                eval_dataset,
                rows=arguments.eval_batch_size,
                limit=arguments.max_evaluation_steps,
            )
        self._probes = build_probes(
            arguments,
            self._model,
            processing_class,
            eval_dataset,
            benchmark,
            watchers,
            train_dataset,
        )
        self._loop: TrainingLoop | None = None

    def prepare(self, batch: HostBatch) -> Prepared:
        """Return the arrays that the loss reads from a loader's batch."""
        return self.method.prepare(batch)

    def loss(self, models: Models, batch: Batch, key: jax.Array | None) -> Loss:
        """Return the sums of the loss over a prepared batch."""
        return self.method.loss(models, batch, key)

    @property
    def model(self) -> LanguageModel:
        """The model with its present weights; while training, the next step overwrites them.

        Variables that the method adds to the model are not part of it.
        """
        self._refresh()
        extension = self.record.extension
        return self._model if extension is None else extension.detach(self._model)

    @property
    def state(self) -> EasyDeLState | None:
        """The present state: of the running training, or the state given to the trainer.

        None for a trainer of a module that is not training.
        """
        return self._state if self._loop is None else self._loop.alive_state() or self._state

    @property
    def rollout(self) -> Rollout | None:
        """The rollout of a method that samples."""
        return self.method.rollout

    def weights(self) -> Weights:
        """Return the present weights for a `Rollout`, valid until the next step begins."""
        weights = None if self._loop is None else self._loop.weights()
        if weights is None:
            self._refresh()
            weights = Weights(*self._model.split_module(), version=self._version)
        return weights

    @property
    def total_steps(self) -> int:
        """Number of updates of the whole run.

        Raises:
            ConfigError: neither the arguments nor the data determine a length.
        """
        if self.arguments.max_training_steps is not None:
            return self.arguments.max_training_steps
        epochs = self.arguments.num_train_epochs
        steps = None if self.feed is None else self._get_epochs(self.feed).count_steps(epochs)
        if steps is None:
            raise ConfigError(
                "train_dataset has no length: set max_training_steps, or per_epoch_training_steps "
                "and num_train_epochs"
            )
        if steps < 1:
            raise ConfigError("train_dataset has no full batch: use more data or a smaller batch")
        return steps

    def _get_epochs(self, feed: Feed) -> Epochs:
        return Epochs(feed, self.arguments.per_epoch_training_steps)

    def train(self, *, until: int | None = None) -> TrainerOutput:
        """Train to the end, from the newest checkpoint if there is one.

        A signal, the time limit or a callback can end training early; see
        `TrainerOutput.stopped_by`.

        Args:
            until: number of updates of the run after which training stops with a checkpoint; None:
                all. Schedules are those of the whole run.

        Raises:
            ConfigError: train_dataset is missing, or its batches do not match the arguments.
            CheckpointError: the checkpoints belong to another run, or cannot be read; or another
                run uses the directory.
            TrainingDiverged: the loss is not finite.
        """
        if self.feed is None:
            raise ConfigError("there is no train_dataset: pass one to the trainer")
        memory = self.arguments.memory_directory
        lock = RunLock(
            Path(self.arguments.save_directory),
            self.arguments.mirror_address,
            launch=None if memory is None else Path(memory).parent.name,
        )
        from_main(lock.acquire)
        try:
            return self._train_locked(lock, until)
        finally:
            lock.release()

    def _train_locked(self, lock: RunLock, until: int | None) -> TrainerOutput:
        assert self.feed is not None
        if self.record.before_training is not None:
            self.record.before_training(
                self.method,
                RunData(
                    self.feed.dataset, self.eval_dataset, self.total_steps, self._first_state()
                ),
            )
        schedule = build_schedule(self.arguments, self.total_steps)
        tx = None if self._state is None else self._state.tx
        self._loop = TrainingLoop(
            Job(
                method=self.method,
                total_steps=self.total_steps,
                feed=self.feed,
                epochs=self._get_epochs(self.feed),
                evaluator=self.evaluator,
                probes=self._probes,
                schedule=schedule,
                tx=tx or build_optimizer(self.arguments, schedule),
                begin=self._first_state,
                adopt=self.adopt,
                save_model=self.save_model,
                notify=self._notify,
                lock=lock,
                settings=self.settings,
                until=until,
            )
        )
        try:
            outcome = self._loop.run()
        finally:
            state = self._loop.alive_state()
            if state is not None:
                self.adopt(state)
            self._loop = None
            if isinstance(self.rollout, AheadRollout):
                self.rollout.close()
        directory = Path(self.arguments.save_directory)
        has_report = outcome["trained_steps"] == 0 and (directory / PAGE).is_file()
        if jax.process_index() == 0 and (directory / RECORD).is_file() and not has_report:
            _report(directory)
        return TrainerOutput(save_directory=directory, **outcome)

    def evaluate(self) -> dict[str, float]:
        """Return `eval_loss`, `eval_perplexity` and the other metrics over the held-out data.

        Means are over tokens, not over batches.

        Raises:
            ConfigError: eval_dataset is missing or empty.
        """
        if self.evaluator is None:
            raise ConfigError("there is no eval_dataset: pass one to the trainer")
        self._refresh()
        state = self.state or self._first_state()
        return self.evaluator.run(state.get_ema_state() if self.arguments.use_ema else state)

    def adopt(self, state: EasyDeLState) -> None:
        """Replace the arrays of `model` by those of a state."""
        nnx.update(self._model, state.graphstate, state.graphother)
        self._version = int(state.step)
        self._reference = state.reference
        if self._state is not None:
            self._state = state

    def stop(self, reason: str) -> None:
        """Stop the running training after the present step, with a checkpoint."""
        if self._loop is not None:
            self._loop.stop.ask(reason)

    def save_checkpoint(self) -> None:
        """Save a checkpoint of the running training after the present step, as SIGUSR1 does."""
        if self._loop is not None:
            self._loop.stop.ask_save()

    def save_model(self, directory: str | Path) -> Path:
        """Write model and tokenizer in Hugging Face layout, and return the written directory.

        Adapters are written to the folder `adapter` next to `directory`. The argument
        `merge_adapters` selects whether they are also merged into the model; if not, only the
        adapters are written.
        """
        model: Any = self.model
        directory = Path(directory)
        if has_lora(model):
            adapter = directory.parent / ADAPTER
            model.save_pretrained(adapter)
            self._save_tokenizer(adapter)
            merges = self.arguments.merge_adapters
            if not (not is_quantized(model) if merges is None else merges):
                self._save_beside(adapter)
                return adapter
            if is_quantized(model):
                model = dequantize(model)
            model = merge_lora(model)
        model.save_pretrained(directory)
        if jax.process_index() == 0:
            write_card(directory, model)
        self._save_beside(directory)
        return directory

    def _save_tokenizer(self, directory: Path) -> None:
        if self.processing_class is not None and jax.process_index() == 0:
            with_length(self.processing_class, self._model).save_pretrained(directory)

    def _save_beside(self, directory: Path) -> None:
        self._save_tokenizer(directory)
        if self.record.extension is not None:
            self._refresh()
            self.record.extension.save(self._model, directory)

    def _first_state(self) -> EasyDeLState:
        """Return the state before training."""
        extension = self.record.extension
        rules = select_parameters(self._model, self.arguments)
        if self._state is not None:
            state = self._state
        elif rules or extension is None:
            state = EasyDeLState.create(model=self._model, trainable=rules)
        else:
            graphdef, params, other_variables = extension.split(self._model)
            state = EasyDeLState.create(
                graphdef=graphdef, graphstate=params, graphother=other_variables
            )
        return self._with_reference(state)

    def _with_reference(self, state: EasyDeLState) -> EasyDeLState:
        """Add the weights of a synchronized reference to a state without them."""
        if self._reference is None or state.reference is not None:
            return state
        return state.replace(reference=self._reference)

    def _present_reference(self) -> nnx.State:
        state = self.state
        reference = self._reference if state is None else state.reference
        assert reference is not None, "the state is created with the reference"
        return reference

    def _get_learned_params(self) -> nnx.State:
        """Return the trained parameters of the model itself, without those of an extension."""
        learned, extension = self._first_state().graphstate, self.record.extension
        if extension is None:
            return learned
        flat = nnx.to_flat_state(learned)
        return nnx.from_flat_state([(path, x) for path, x in flat if not extension.owns_path(path)])

    def _refresh(self) -> None:
        """Replace the arrays of the model by those of the running training."""
        if self._loop is None or not self._loop.began:
            return
        state = self._loop.alive_state()
        if state is None:
            raise EasyDeLError(
                "a training step failed after the model's arrays were donated: load the newest "
                f"checkpoint in {self.arguments.save_directory}, or create the model again"
            )
        nnx.update(self._model, state.graphstate, state.graphother)

    def _notify(self, event: str, *values: object) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *values)

    def _checked_roles(self, models: Mapping[str, LanguageModel]) -> Mapping[str, LanguageModel]:
        """Check that the method reads the frozen models, and that none is missing."""
        name, roles = type(self).__name__, {role.name: role for role in self.entry.roles}
        for role_name in models:
            if role_name not in roles:
                raise unknown_name(f"frozen model of {name}", role_name, roles)
        for role in roles.values():
            if role.required and role.name not in models:
                raise ConfigError(
                    f"{name} reads the frozen model {role.name!r}: "
                    f"pass it as frozen={{{role.name!r}: model}}"
                )
        return models

    def _build_feed(self, dataset: Dataset) -> Feed:
        """Return the training batches of a dataset, by step."""
        if self.record.feed is not None:
            return self.record.feed(self.method, dataset)
        if self.method.whole_batches:
            return Feed(dataset)
        return Feed(dataset, Share.of(dataset, self.placement, self.method.rows))


def trainer_of(record: Method, entry: MethodEntry, name: str) -> type[Trainer]:
    """Return a trainer class for a method.

    Args:
        record: the functions of the method.
        entry: its options, roles and data.
        name: name of the class.
    """
    return type(name, (Trainer,), {"record": record, "entry": entry})


def _report(directory: Path) -> None:
    """Write the report of a run; print a message if the disk is full."""
    try:
        write_report(directory)
    except OSError as error:
        if not disk.is_full(error):
            raise
        room = disk.room(directory, (directory / RECORD).stat().st_size)
        print(f"the report of {directory} could not be written: {room}", flush=True)
