"""Supervised fine-tuning and pre-training: the cross-entropy of the next token.

For an encoder-decoder the tokens are those of the decoder; its encoder reads tokens or recordings.

Legend: b rows, s positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from ed_infra.outputs import CausalLMOutput, Metric
from ed_layers.losses import TokenLoss
from ed_models.protocol import LanguageModel

from ed_trainers.arguments import METHODS, SFTArguments
from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, Loss, Method, MethodRun, Models, Prepared
from ed_trainers.losses.mtp import MTP_LOSS, predict_further_tokens
from ed_trainers.losses.next_token import next_token_batch, reads_sound, speech_batch
from ed_trainers.losses.scoring import forward, target_logps
from ed_trainers.losses.token_loss import token_cross_entropy
from ed_trainers.methods.transcripts import Transcripts
from ed_trainers.options.distillation import SeqKDArguments
from ed_trainers.state import EasyDeLState
from ed_trainers.trainer import Trainer


class SFTRun(MethodRun[SFTArguments]):
    """A run of `sft`."""

    transcripts: Transcripts

    def create_parts(self, models: dict[str, LanguageModel]) -> None:
        """See `MethodRun`."""
        self.transcripts = Transcripts(self)


def prepare(run: MethodRun, batch: HostBatch) -> Prepared:
    """Shift the labels by one within segments; see `next_token_batch` and `speech_batch`."""
    if reads_sound(run.learner):
        return speech_batch(batch, run.learner)
    return next_token_batch(batch, run.learner)


def loss(
    run: MethodRun[SFTArguments | SeqKDArguments],
    models: Models,
    batch: Batch,
    key: jax.Array | None,
) -> Loss:
    """Return the cross-entropy of the targets; see `cross_entropy`."""
    arguments = run.arguments
    noise = arguments.neftune_noise_alpha
    if key is None or not isinstance(arguments, SFTArguments) or arguments.loss_type != "dft":
        output, result = forward_cross_entropy(run, models, batch, key, noise=noise)
        return add_mtp_loss(run, models.learner, batch, output, result)
    options = {"placement": run.placement, "chunk": arguments.lmhead_chunksize, "noise": noise}
    output, logps = target_logps(models.learner, batch, key, **options)
    weights = batch["weights"]
    losses = -jax.lax.stop_gradient(jnp.exp(logps)) * logps
    result = Loss.of(output, jnp.sum(weights * losses), jnp.sum(weights))
    return add_mtp_loss(run, models.learner, batch, output, result)


def cross_entropy(
    run: MethodRun[Any],
    models: Models,
    batch: Batch,
    key: jax.Array | None,
    *,
    noise: float | None = None,
) -> Loss:
    """Return the loss of `forward_cross_entropy`."""
    return forward_cross_entropy(run, models, batch, key, noise=noise)[1]


def forward_cross_entropy(
    run: MethodRun[Any],
    models: Models,
    batch: Batch,
    key: jax.Array | None,
    *,
    noise: float | None = None,
) -> tuple[CausalLMOutput, Loss]:
    """Return the output of the learner, and the weighted sum of `-log p(target)` in nats.

    Label smoothing, z-loss and noise on embeddings apply in training only, when there is a key.

    Args:
        run: the run of a method whose options are `NextTokenArguments`.
        models: the models.
        batch: the arrays of the learner, `targets` and `weights`.
        key: dropout key.
        noise: see `build_noise_inputs`.
    """
    model, arguments = models.learner, run.arguments
    extra = TokenLoss()
    if key is not None:
        extra = TokenLoss(arguments.label_smoothing_factor, arguments.z_loss_coefficient)
    output = forward(model, batch, key, noise=noise)
    assert output.last_hidden_state is not None
    total = token_cross_entropy(
        output.last_hidden_state,
        model.head(),
        batch["targets"],
        batch["weights"],
        sharding=run.placement.sharding(batch["targets"].shape),
        chunk=arguments.lmhead_chunksize,
        loss=extra,
    )
    return output, Loss.of(output, total, jnp.sum(batch["weights"]))


def add_mtp_loss(
    run: MethodRun[SFTArguments | SeqKDArguments],
    learner: LanguageModel,
    batch: Batch,
    output: CausalLMOutput,
    result: Loss,
) -> Loss:
    """Return a loss with the term of the MTP layer, if `mtp_loss_weight` is positive."""
    arguments = run.arguments
    if not isinstance(arguments, SFTArguments) or not arguments.mtp_loss_weight:
        return result
    assert output.last_hidden_state is not None
    hidden, targets, weights = predict_further_tokens(learner, batch, output.last_hidden_state)
    total = token_cross_entropy(
        hidden,
        learner.head(),
        targets,
        weights,
        sharding=run.placement.sharding(targets.shape),
        chunk=arguments.lmhead_chunksize,
    )
    term = Metric.of(arguments.mtp_loss_weight * total, jnp.sum(weights))
    return result._replace(sums={**result.sums, MTP_LOSS: term})


def measure(run: SFTRun, batches: Iterable[HostBatch], state: EasyDeLState) -> dict[str, float]:
    """With `predict_with_generate`, return the error rates of held-out transcripts."""
    return run.transcripts.rates(batches, state)


SFT = Method[SFTRun](run=SFTRun, prepare=prepare, loss=loss, measure=measure)


class SFTTrainer(Trainer):
    """Trains a model to predict the labels of each row; `arguments` are `SFTArguments`."""

    entry = METHODS["sft"]
    record = SFT
