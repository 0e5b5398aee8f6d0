"""What a model says of a prepared batch, token by token, in chunks: never full logits.

Legend: r rows, s positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
from ed_infra.errors import ConfigError
from ed_infra.outputs import CausalLMOutput, SequenceClassifierOutput
from ed_models.protocol import LanguageModel

from ed_trainers.contract import Batch
from ed_trainers.losses.neftune import noisy_embeddings
from ed_trainers.losses.token_loss import token_logprobs
from ed_trainers.placement import Placement


def noise_of(
    model: LanguageModel, batch: Batch, key: jax.Array | None, noise: float | None
) -> dict[str, jax.Array]:
    """The argument `inputs_embeds` of a forward pass that is to have NEFTune's noise, if any.

    Args:
        model: the learner.
        batch: `input_ids`, `segment_ids` [r, s].
        key: None (an evaluation) means no noise.
        noise: its size, NEFTune's alpha; None for none.
    """
    if key is None or noise is None:
        return {}
    return {"inputs_embeds": noisy_embeddings(model, batch, key, alpha=noise)}


def forward(
    model: LanguageModel,
    batch: Batch,
    key: jax.Array | None,
    *,
    hidden_states: bool = False,
    noise: float | None = None,
) -> CausalLMOutput:
    """Run a model over a batch [r, s] without logits.

    Args:
        model: learner or frozen model.
        batch: `input_ids`, `segment_ids`, `position_ids`.
        key: dropout key; None = deterministic.
        hidden_states: also return the input of every layer.
        noise: see `noise_of`.
    """
    more: dict[str, Any] = {"output_hidden_states": True} if hidden_states else {}
    more |= noise_of(model, batch, key, noise)
    return model(
        batch["input_ids"],
        segment_ids=batch["segment_ids"],
        position_ids=batch["position_ids"],
        logits_at="none",
        key=key,
        **more,
    )


def token_scores(
    model: LanguageModel,
    batch: Batch,
    key: jax.Array | None,
    *,
    labels: int,
    noise: float | None = None,
) -> tuple[SequenceClassifierOutput, jax.Array]:
    """Return the output of a classifier, and the scores of every token, float32 [r, s, c].

    Args:
        model: the learner, a `SequenceClassifier`; a `LanguageModel` in all but its head.
        batch: `input_ids`, `segment_ids`, `position_ids` [r, s].
        key: dropout key; None = deterministic.
        labels: c.
        noise: see `noise_of`.

    Raises:
        ConfigError: the model has another number of outputs.
    """
    call = cast(Callable[..., SequenceClassifierOutput], model)
    output = call(
        batch["input_ids"],
        segment_ids=batch["segment_ids"],
        position_ids=batch["position_ids"],
        logits_at="all",
        key=key,
        **noise_of(model, batch, key, noise),
    )
    if output.logits.shape[-1] != labels:
        raise ConfigError(
            f"{type(model).__name__} has {output.logits.shape[-1]} outputs, and this method needs "
            f"{labels}: give a model for sequence classification with num_labels={labels}"
        )
    return output, output.logits


def target_logps(
    model: LanguageModel,
    batch: Batch,
    key: jax.Array | None,
    *,
    placement: Placement,
    chunk: int | None,
    noise: float | None = None,
) -> tuple[CausalLMOutput, jax.Array]:
    """Return the output of a forward pass, and the log-probability of each target, [r, s].

    Args:
        model: learner or frozen model.
        batch: as for `forward`, and `targets`.
        key: dropout key.
        placement: says which devices hold which tokens.
        chunk: tokens whose logits exist at once; None lets the loss choose.
        noise: see `noise_of`.
    """
    output = forward(model, batch, key, noise=noise)
    assert output.last_hidden_state is not None
    targets = batch["targets"]
    sharding = placement.sharding(targets.shape, stacked=False)
    logps, _ = token_logprobs(
        output.last_hidden_state, model.head(), targets, sharding=sharding, chunk=chunk
    )
    return output, logps
