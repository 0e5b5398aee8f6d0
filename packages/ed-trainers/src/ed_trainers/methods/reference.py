"""`Reference`: the reference policy of a method.

The reference is the frozen model `"reference"`. Without that model, the reference of a learner with
adapters is the base under the adapters, and of any other learner its weights before training.

Legend: r rows, s positions and slots of segments.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import ClassVar, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
from ed_infra.errors import ConfigError
from ed_models.adapters.lora import has_lora, remove_lora
from ed_models.protocol import LanguageModel
from flax import nnx

from ed_trainers.batches import BatchLoader, Dataset
from ed_trainers.contract import A, Batch, MethodRun, Models, Prepared, RunData
from ed_trainers.losses.pairs import TOKEN_SHARES, get_slots
from ed_trainers.losses.scoring import target_logps
from ed_trainers.losses.segments import Answers
from ed_trainers.methods.reference_cache import INPUTS, REFERENCE_FILE, ReferenceLogps
from ed_trainers.options.preference import AnswerArguments, ReferenceArguments
from ed_trainers.placement import with_arrays
from ed_trainers.roles.frozen import Following

_NAME = "reference"


@runtime_checkable
class ReferenceOptions(Protocol):
    """The options of a reference that methods on given answers and methods that sample share."""

    sync_ref_model: bool
    ref_model_mixup_alpha: float
    ref_model_sync_steps: int

    @property
    def has_reference(self) -> bool:
        """Whether the loss reads a reference."""
        ...

    @property
    def without_reference(self) -> str:
        """The option that turns the reference off, for messages."""
        ...


class Reference:
    """The reference policy of a run.

    Args:
        run: the run of the method, with options of `ReferenceOptions`.
        models: the frozen models by role; gets the learner as the reference where this is needed.
        sides: number of rows of a model for each row of a batch, 2 for pairs.

    Raises:
        ConfigError: a reference is given although none is read, or it cannot be synchronized.
    """

    def __init__(self, run: MethodRun, models: dict[str, LanguageModel], *, sides: int = 1):
        options = run.arguments
        assert isinstance(options, ReferenceOptions), "the class of options has a reference"
        self._run, self._exists, self._sides = run, options.has_reference, sides
        self._ahead: ReferenceLogps | None = None
        if not options.has_reference:
            if _NAME in models:
                raise ConfigError(
                    f"with {options.without_reference} no reference is read: omit the reference, "
                    "or change the option"
                )
            return
        is_learner = _NAME not in models or models[_NAME] is run.learner
        if options.sync_ref_model:
            models[_NAME] = self._follow_learner(options, models.get(_NAME, run.learner))
        elif isinstance(run.arguments, ReferenceArguments) and (
            run.arguments.precompute_ref_log_probs
        ):
            self._ahead = self._precompute_logps(models.pop(_NAME, run.learner), is_learner)
        elif is_learner and has_lora(run.learner):
            models.pop(_NAME, None)  # `Models` returns the base under the adapters
        else:
            models.setdefault(_NAME, run.learner)

    def _follow_learner(self, options: ReferenceOptions, model: LanguageModel) -> LanguageModel:
        run = self._run
        if has_lora(run.learner):
            raise ConfigError(
                "sync_ref_model moves the weights of the reference, and the reference of a model "
                "with adapters is its own base, which does not move: omit sync_ref_model, or train "
                "without adapters"
            )
        run.following = Following(
            _NAME,
            run.placement.frozen(_NAME, model),
            run.learned(),
            alpha=options.ref_model_mixup_alpha,
            every=options.ref_model_sync_steps,
            present=run.present_reference,
        )
        return model

    def _precompute_logps(self, model: LanguageModel, is_learner: bool) -> ReferenceLogps:
        run, arguments = self._run, self._run.arguments
        assert isinstance(arguments, AnswerArguments), "the options of a method on answers"
        if "pixel_values" in run.learner.input_names:
            raise ConfigError(
                "precompute_ref_log_probs stores log-probabilities by the tokens of an answer, and "
                "answers about images also depend on the images: set precompute_ref_log_probs: "
                "false"
            )
        model = run.placement.frozen(_NAME, model)
        if is_learner and has_lora(model):
            model = cast(LanguageModel, remove_lora(cast(nnx.Module, model)))
        return ReferenceLogps(
            model,
            placement=run.placement,
            chunk=arguments.lmhead_chunksize,
            path=Path(arguments.save_directory) / REFERENCE_FILE,
            rows=run.rows * self._sides,
        )

    @property
    def is_computed_ahead(self) -> bool:
        """Whether the log-probabilities are computed before training, by all processes together."""
        return self._ahead is not None

    def add_logps(self, prepared: Prepared) -> Prepared:
        """Add `reference_logps`, shaped as `input_ids`, if they are computed before training.

        Args:
            prepared: arrays [b, s], or [b, 2, s] of pairs.
        """
        if self._ahead is None:
            return prepared
        axes = prepared.get_logical_axes("targets")
        shape = prepared["targets"].shape
        names = [name for name in INPUTS if name in prepared]
        rows = {name: prepared[name].reshape(-1, prepared[name].shape[-1]) for name in names}
        return with_arrays(prepared, axes, reference_logps=self._ahead(rows).reshape(shape))

    def logps(self, models: Models, rows: Batch) -> jax.Array:
        """Return the log-probability of each answer of rows [r, s]; without gradient."""
        if not self._exists:
            return jnp.zeros(rows["targets"].shape, jnp.float32)
        if "reference_logps" in rows:
            return rows["reference_logps"]
        arguments = self._run.arguments
        assert isinstance(arguments, AnswerArguments), "the options of a method on answers"
        _, logps = target_logps(
            models[_NAME],
            rows,
            None,
            placement=self._run.placement,
            chunk=arguments.lmhead_chunksize,
        )
        counted_logps = logps * rows.get(TOKEN_SHARES, 1.0)
        answers = Answers.of(counted_logps, rows["weights"], get_slots(rows))
        return jax.lax.stop_gradient(answers.logps)


class ReferenceRun(MethodRun[A]):
    """A run of a method on given answers that compares them with those of a reference."""

    #: Number of rows of a model for each row of a batch, 2 for pairs.
    sides: ClassVar[int] = 1
    reference: Reference

    def create_parts(self, models: dict[str, LanguageModel]) -> None:
        """See `MethodRun`."""
        self.reference = Reference(self, models, sides=self.sides)


def compute_ahead(run: ReferenceRun, data: RunData) -> None:
    """Compute the log-probabilities of the reference for all data, if `precompute_ref_log_probs`.

    Raises:
        ConfigError: a dataset is not a loader with a length.
    """
    ahead = run.reference._ahead
    if ahead is None:
        return
    walks: list[tuple[Dataset | None, str, int | None, bool]] = [
        (data.train, "train_dataset", data.total_steps, False)
    ]
    if data.evaluation is not None:
        count = getattr(data.evaluation, "steps_per_epoch", None)
        walks.append((data.evaluation, "eval_dataset", count, True))
    for dataset, name, steps, held_out in walks:
        if not isinstance(dataset, BatchLoader) or steps is None:
            raise ConfigError(
                f"precompute_ref_log_probs reads {name} before training: pass a loader with "
                "batch_at(step) and a length, or omit the option"
            )
        if jax.process_index() == 0:
            print(f"log-probabilities of the reference: {steps} batches of {name}", flush=True)
        batches = map(dataset.batch_at, range(steps))
        prepared = run.held_out(batches, data.state) if held_out else map(run.prepare, batches)
        # The prepared rows are not needed: the cache has the log-probabilities.
        deque(prepared, maxlen=0)
    ahead.let_go()


def reads_whole_batches(run: ReferenceRun) -> bool:
    """Whether all processes compute the log-probabilities of the reference together."""
    return run.reference.is_computed_ahead
