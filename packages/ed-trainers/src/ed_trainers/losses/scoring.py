"""Forward passes over a prepared batch, and log-probabilities of its targets in chunks.

Legend: r rows, s positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
from ed_infra.errors import ConfigError
from ed_infra.inputs import ROUTED_EXPERTS
from ed_infra.outputs import CausalLMOutput, SequenceClassifierOutput
from ed_models.protocol import LanguageModel

from ed_trainers.contract import Batch, MethodRun, Models
from ed_trainers.losses.neftune import noisy_embeddings
from ed_trainers.losses.token_loss import token_logprobs
from ed_trainers.options.preference import AnswerArguments
from ed_trainers.placement import Placement


def build_noise_inputs(
    model: LanguageModel, batch: Batch, key: jax.Array | None, noise: float | None
) -> dict[str, jax.Array]:
    """Return the argument `inputs_embeds` with NEFTune's noise, or nothing without noise.

    Args:
        model: the learner.
        batch: `input_ids`, `segment_ids` [r, s].
        key: None (an evaluation) means no noise.
        noise: NEFTune's alpha; None means no noise.
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
    """Run a model over a batch without logits. The model gets the arrays in its `input_names`, and
    recorded experts.

    Args:
        model: learner or frozen model.
        batch: `input_ids` [r, s] and any other arrays.
        key: dropout key; None = deterministic.
        hidden_states: also return the input of every layer.
        noise: see `build_noise_inputs`.
    """
    more: dict[str, Any] = {"output_hidden_states": True} if hidden_states else {}
    more |= build_noise_inputs(model, batch, key, noise)
    more |= batch.select((ROUTED_EXPERTS,))
    return model(**batch.select(model.input_names), logits_at="none", key=key, **more)


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
        model: the learner, a `SequenceClassifier`: a `LanguageModel` with another head.
        batch: `input_ids`, `segment_ids`, `position_ids` [r, s].
        key: dropout key; None = deterministic.
        labels: c.
        noise: see `build_noise_inputs`.

    Raises:
        ConfigError: the model has a different number of outputs.
    """
    call = cast(Callable[..., SequenceClassifierOutput], model)
    output = call(
        **batch.select(model.input_names),
        logits_at="all",
        key=key,
        **build_noise_inputs(model, batch, key, noise),
    )
    if output.logits.shape[-1] != labels:
        raise ConfigError(
            f"{type(model).__name__} has {output.logits.shape[-1]} outputs, and this method needs "
            f"{labels}: use a model for sequence classification with num_labels={labels}"
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
    """Return the output of a forward pass and the log-probability of each target, [r, s].

    Args:
        model: learner or frozen model.
        batch: as for `forward`, and `targets`.
        key: dropout key.
        placement: determines which devices hold which tokens.
        chunk: number of tokens whose logits exist at the same time; None uses the default of the
            loss.
        noise: see `build_noise_inputs`.
    """
    output = forward(model, batch, key, noise=noise)
    assert output.last_hidden_state is not None
    targets = batch["targets"]
    sharding = placement.sharding(targets.shape)
    logps, _ = token_logprobs(
        output.last_hidden_state, model.head(), targets, sharding=sharding, chunk=chunk
    )
    return output, logps


def learner_logps(
    run: MethodRun, models: Models, rows: Batch, key: jax.Array | None
) -> tuple[CausalLMOutput, jax.Array]:
    """Return the learner's output and the log-probability of each target, [r, s].

    Args:
        run: the run of a method on given answers; its options have `lmhead_chunksize` and
            `neftune_noise_alpha`.
        models: the models.
        rows: as for `target_logps`.
        key: dropout key.
    """
    options = run.arguments
    assert isinstance(options, AnswerArguments), "the options of a method on answers"
    return target_logps(
        models.learner,
        rows,
        key,
        placement=run.placement,
        chunk=options.lmhead_chunksize,
        noise=options.neftune_noise_alpha,
    )
