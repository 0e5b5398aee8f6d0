"""Self-distillation fine-tuning: the learner's own distributions after a demonstration.

Shenfeld et al., arXiv:2601.19897, with the formulas of TRL's trainer. The teacher is the learner
before training, a running mean of the learner, or the learner. The teacher reads a longer prompt
with the demonstration of the row, and the same completion as the learner. The loss is the
divergence of the two distributions of each token, as in `sdpo`. There are no rewards.

Legend: n completions, b rows, s positions of the learner's rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.outputs import Metric
from ed_models.protocol import LanguageModel

from ed_trainers.arguments import METHODS
from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, Loss, Models
from ed_trainers.methods.sdpo import (
    DISTILLATION_LOSS,
    TEACHER_ARRAYS,
    SelfTeacher,
    build_teacher_rows,
    sum_divergences,
)
from ed_trainers.online.completions import (
    Completions,
    PromptContent,
    PromptRows,
    WrittenPrompts,
)
from ed_trainers.online.phase import OnlineRun, PhaseRows, compute_policy, online_method
from ed_trainers.online.reprompts import build_demonstrations, demonstrate, encode_prompt
from ed_trainers.options.distillation import SDFTArguments
from ed_trainers.rollout import Weights
from ed_trainers.trainer import Trainer


class SDFTRun(OnlineRun[SDFTArguments]):
    """A run of `sdft`."""

    teacher: SelfTeacher

    def create_parts(self, models: dict[str, LanguageModel]) -> None:
        """See `MethodRun`."""
        super().create_parts(models)
        self.teacher = SelfTeacher(self, models)


def complete(run: SDFTRun, batch: HostBatch, weights: Weights, number: int) -> Completions:
    """Return completions after the learner's prompts, or after the teacher's."""
    options = run.arguments
    if not options.generate_from_teacher:
        return run.phase.sample(batch, weights, number=number)
    written: list[PromptContent] = list(getattr(batch, "prompts", ()))
    if not isinstance(batch, PromptRows) or not written:
        raise ConfigError(
            "generate_from_teacher writes the teacher's prompts: pass a loader of "
            "ed_data.build_prompts, whose prompts are texts or chats"
        )
    fields: Mapping[str, Sequence[object]] = getattr(batch, "fields", {})
    contexts = fields.get("privileged_context", [None] * len(written))
    encode = getattr(batch, "with_prompt", None)
    prompts = [
        demonstrate(options, prompt, context)
        for prompt, context in zip(written, contexts, strict=True)
    ]
    ids = [encode_prompt(encode, row, text, run.tokenizer) for row, text in enumerate(prompts)]
    longer = WrittenPrompts(prompts, ids, fields, {}, encode)
    completions = run.phase.sample(cast(HostBatch, longer), weights, number=number)
    copies = len(completions) // len(written)
    limit = options.max_prompt_length
    return replace(
        completions,
        prompts=[prompt for prompt in written for _ in range(copies)],
        prompt_ids=[list(row)[-limit:] for row in batch.input_ids for _ in range(copies)],
    )


def rows(run: SDFTRun, completions: Completions, weights: Weights, number: int) -> PhaseRows:
    """Return the rows of the completions and those of the teacher; see `build_teacher_rows`."""
    del number
    options = run.arguments
    row_arrays = dict(completions.rows(options.row_length))
    places = np.cumsum(row_arrays["weights"] > 0, axis=-1)
    row_arrays["weights"] *= (places > options.num_loss_tokens_to_skip).astype(np.float32)
    if options.keeps_old:
        row_arrays |= run.phase.ask(_score_tokens, row_arrays, weights)
    reprompts = build_demonstrations(options, completions, run.tokenizer)
    row_arrays |= build_teacher_rows(completions, reprompts, options.row_length)
    row_arrays["present"] = np.ones(len(completions), np.float32)
    return row_arrays, {}


def _score_tokens(run: SDFTRun, models: Models, batch: Batch) -> dict[str, jax.Array]:
    """Return `old_logps` of rows, [n, s]."""
    return {"old_logps": compute_policy(run, models.learner, batch)[1].logps}


def loss(run: SDFTRun, models: Models, batch: Batch, key: jax.Array | None) -> Loss:
    """Return the mean divergence of the tokens of each completion, summed over the completions."""
    output, policy = compute_policy(run, models.learner, batch, key)
    mask, teacher = batch["weights"], run.teacher.select(models)
    total, figure = sum_divergences(run, models, teacher, batch, output, policy, mask)
    entropy = Metric.of(jnp.sum(policy.entropy * mask), jnp.sum(mask))
    metrics = {DISTILLATION_LOSS: figure, "entropy": entropy}
    return Loss.of(output, total, jnp.sum(batch["present"]), **metrics)


SDFT = online_method(
    run=SDFTRun,
    rows=rows,
    loss=loss,
    complete=complete,
    token_arrays=("old_logps", *TEACHER_ARRAYS),
    progress_columns=(DISTILLATION_LOSS, "entropy", "completions/mean_length", "loss"),
)


class SDFTTrainer(Trainer):
    """Trains a model on its own distributions after demonstrations; see `SDFTArguments`."""

    entry = METHODS["sdft"]
    record = SDFT
