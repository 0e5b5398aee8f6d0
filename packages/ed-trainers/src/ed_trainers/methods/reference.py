"""What methods with a reference share: which model it is, and its log-probabilities.

The reference is `frozen={"reference": model}`; else, of a learner with adapters, the base under
them; else the learner as it is before training.

Legend: r rows, s positions, and slots of segments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import ClassVar, cast

import jax
import numpy as np
from ed_infra.errors import ConfigError
from ed_models.adapters.lora import has_lora, remove_lora
from ed_models.protocol import LanguageModel
from flax import nnx

from ed_trainers.batches import HostBatch, Loader
from ed_trainers.contract import Batch, Models
from ed_trainers.losses.scoring import target_logps
from ed_trainers.losses.segments import Answers
from ed_trainers.methods.reference_cache import FILE, ReferenceLogps
from ed_trainers.options.preference import ReferenceArguments
from ed_trainers.synced import SyncedReference
from ed_trainers.trainer import TrainerOutput

Prepare = Callable[[Iterable[HostBatch]], Iterator[dict[str, np.ndarray]]]


class ReferenceTrainer(SyncedReference):
    """A trainer whose loss compares the learner's answers with a reference's."""

    frozen_models: ClassVar[tuple[str, ...]] = ("reference",)
    arguments: ReferenceArguments
    #: Rows that go through a model for each row of a batch.
    rows_of_a_row: ClassVar[int] = 1
    _ahead: ReferenceLogps | None = None

    def frozen_of(self, models: Mapping[str, LanguageModel]) -> Mapping[str, LanguageModel]:
        """Find the reference; see the module."""
        if not self.arguments.has_reference:
            if models:
                raise ConfigError(
                    "with reference_free no reference is read: leave it out, or reference_free"
                )
            return {}
        models = super().frozen_of({"reference": self._model, **models})
        own = models["reference"] is self._model
        if not self.arguments.precompute_ref_log_probs:
            return {} if own and has_lora(self._model) else models
        reference = self.on_mesh("reference", models["reference"])
        if own and has_lora(reference):
            reference = cast(LanguageModel, remove_lora(cast(nnx.Module, reference)))
        arguments = self.arguments
        rows = arguments.total_batch_size // arguments.gradient_accumulation_steps
        self._ahead = ReferenceLogps(
            reference,
            placement=self.placement,
            chunk=arguments.lmhead_chunksize,
            path=Path(arguments.save_directory) / FILE,
            rows=rows * self.rows_of_a_row,
        )
        return {}

    @property
    def whole_batches(self) -> bool:
        """What is computed ahead, all processes compute together."""
        return self._ahead is not None

    def with_reference(self, prepared: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Add `reference_logps`, shaped as `targets`, where they are computed ahead."""
        if self._ahead is None:
            return prepared
        shape = prepared["input_ids"].shape
        rows = {name: array.reshape(-1, shape[-1]) for name, array in prepared.items()}
        return {**prepared, "reference_logps": self._ahead(rows).reshape(shape)}

    def reference_logps(self, models: Models, rows: Batch) -> jax.Array:
        """Log-probability of each answer of rows [r, s] under the reference; no gradient."""
        if not self.arguments.has_reference:
            return jax.numpy.zeros(rows["targets"].shape, jax.numpy.float32)
        if "reference_logps" in rows:
            return rows["reference_logps"]
        _, logps = target_logps(
            models["reference"],
            rows,
            None,
            placement=self.placement,
            chunk=self.arguments.lmhead_chunksize,
        )
        answers = Answers.of(logps, rows["weights"], rows["segment_ids"])
        return jax.lax.stop_gradient(answers.logps)

    def train(self) -> TrainerOutput:
        """Train; what is to be computed ahead is computed first."""
        if self._ahead is not None:
            self._compute_ahead(self._ahead)
        return super().train()

    def _compute_ahead(self, ahead: ReferenceLogps) -> None:
        of_training = None if self.feed is None else self.feed.dataset
        walks: list[tuple[object, str, int | None, Prepare]] = [
            (of_training, "train_dataset", self.total_steps, partial(map, self.prepare))
        ]
        held_out = self.eval_dataset
        if held_out is not None:
            count = getattr(held_out, "steps_per_epoch", None)
            state = self._first_state()
            walks.append((held_out, "eval_dataset", count, partial(self.held_out, state=state)))
        for dataset, name, steps, prepare in walks:
            if not isinstance(dataset, Loader) or steps is None:
                raise ConfigError(
                    f"precompute_ref_log_probs reads {name} before training: give a loader with "
                    "batch_at(step) and a length, or leave the option out"
                )
            if jax.process_index() == 0:
                print(f"log-probabilities of the reference: {steps} batches of {name}", flush=True)
            # The prepared rows are dropped: `ahead` keeps the log-probabilities.
            deque(prepare(map(dataset.batch_at, range(steps))), maxlen=0)
        ahead.let_go()
