"""Generalized knowledge distillation: a student learns a teacher's distributions on its own texts.

Agarwal et al., arXiv:2306.13649, algorithm 1: a share `lmbda` of the generations is completed by
the student, the others by the teacher or by the data; then the divergence of the two distributions
of each token of the completions. `losses.divergence` has the divergences.

Legend: n completions, b rows, s positions.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.outputs import Metric

from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, Loss, Models
from ed_trainers.losses.divergence import compared
from ed_trainers.online.completions import Completions, Content, PromptBatch
from ed_trainers.online.feed import Generation
from ed_trainers.online.trainer import HELD_OUT, OnlineTrainer
from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.gkd import GKDArguments
from ed_trainers.rollout import Weights

#: The field of the data that holds completions.
FIELD = "completion"
# Apart from the numbers that draw the seeds of samples.
_WHO = 1


class GKDTrainer(OnlineTrainer):
    """Learns the distributions of the frozen model `"teacher"`; `arguments` are `GKDArguments`.

    The teacher has the student's vocabulary and, for `seq_kd`, `generate`.
    """

    arguments_class: ClassVar[type[TrainingArguments]] = GKDArguments
    frozen_models: ClassVar[tuple[str, ...]] = ("teacher",)
    arguments: GKDArguments
    progress_columns: ClassVar[tuple[str, ...]] = ("loss", "nll_loss", "completions/mean_length")

    def generate(self, batch: HostBatch, weights: Weights, number: int) -> Generation:
        """See `OnlineTrainer.generate`; `on_policy` is 1 where the student completed."""
        made = super().generate(batch, weights, number)
        figures = {**made.figures, "on_policy": float(self.is_on_policy(number))}
        return made._replace(figures=figures)

    def is_on_policy(self, number: int) -> bool:
        """Whether the student completes the prompts of a generation; follows from the seed.

        It completes held-out ones wherever `lmbda` is above 0.
        """
        if number == HELD_OUT:
            return self.arguments.lmbda > 0
        draw = np.random.default_rng((self.arguments.seed, number, _WHO)).random()
        return bool(draw < self.arguments.lmbda)

    def complete(
        self, batch: HostBatch, weights: Weights, *, number: int, **settings: Any
    ) -> Completions:
        """Complete prompts by the student, the teacher or the data."""
        if self.is_on_policy(number):
            return super().complete(batch, weights, number=number, **settings)
        if self.arguments.seq_kd:
            teacher = self.rollout_of(lambda models: models["teacher"])
            return super().complete(batch, weights, number=number, rollout=teacher, **settings)
        return self._of_data(batch)

    def _of_data(self, batch: HostBatch) -> Completions:
        """The completions that the rows of data bring."""
        fields = getattr(batch, "fields", {})
        if not isinstance(batch, PromptBatch) or FIELD not in fields:
            raise ConfigError(
                f"lmbda {self.arguments.lmbda} leaves generations to the field {FIELD!r} of the "
                f"data, and the rows do not bring it: write additional_fields: [{FIELD}] in the "
                "inform; or set seq_kd for the teacher's, or lmbda 1 for the student's alone"
            )
        arguments = self.arguments
        prompts = [list(ids)[-arguments.max_prompt_length :] for ids in batch.input_ids]
        whole = [self._tokens(answer, row) for row, answer in enumerate(fields[FIELD])]
        return Completions(
            prompts=list(getattr(batch, "prompts", prompts)),
            prompt_ids=prompts,
            completion_ids=[ids[: arguments.max_completion_length] for ids in whole],
            logprobs=[[] for _ in whole],
            completions=list(fields[FIELD]),
            ended=[len(ids) <= arguments.max_completion_length for ids in whole],
            fields=fields,
        )

    def _tokens(self, answer: Content | None, row: int) -> list[int]:
        """Token ids of a completion of the data, the end token included."""
        if isinstance(answer, str) and callable(self.processing_class):
            tokenizer: Any = self.processing_class
            ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
            end = getattr(tokenizer, "eos_token_id", None)
            return [*ids, *([] if end is None else [end])]
        if isinstance(answer, list) and answer and all(isinstance(x, int) for x in answer):
            return [int(x) for x in answer]  # type: ignore[call-overload]
        raise ConfigError(
            f"row {row} has the {FIELD} {answer!r:.60}: gkd takes a text, for which the trainer "
            "needs a tokenizer, or token ids"
        )

    def rows_of(
        self, completions: Completions, weights: Weights
    ) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Make rows of the completions alone."""
        return completions.rows(self.arguments.row_length), {}

    def loss(self, models: Models, batch: Batch, key: jax.Array | None) -> Loss:
        """Return the divergence summed over the completions' tokens."""
        output, _, divergence, logp = compared(
            models.learner,
            models["teacher"],
            batch,
            key,
            placement=self.placement,
            beta=self.arguments.beta,
            temperature=1.0,
            chunk=self.arguments.lmhead_chunksize,
            noise=self.arguments.neftune_noise_alpha,
        )
        weights = batch["weights"]
        count = jnp.sum(weights)
        nll = Metric.of(-jnp.sum(weights * logp), count)
        return Loss.of(output, jnp.sum(weights * divergence), count, nll_loss=nll)
