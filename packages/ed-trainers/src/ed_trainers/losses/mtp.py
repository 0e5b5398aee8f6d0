"""Predictions of the MTP layer, and its loss: the cross-entropy of the token after the next one.

Position i reads the hidden state of token i and the token i + 1, and predicts the label of token
i + 2 (`ed_models.body.mtp`). A position counts if the label counts and the three tokens are in one
segment. The loss is that of DeepSeek-V3 (arXiv:2412.19437, equations 24 and 25) with one layer:
gradients reach the model through its hidden states, embedding and head, as far as these are
trained.

Legend: b rows, s positions, d hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from ed_infra.outputs import BaseModelOutput
from ed_models.protocol import LanguageModel
from jaxtyping import Array, Float, Int

from ed_trainers.contract import Batch

#: Name of the term of the loss.
MTP_LOSS = "mtp_loss"


def predict_further_tokens(
    learner: LanguageModel, batch: Batch, hidden: Float[Array, "b s d"]
) -> tuple[Float[Array, "b s d"], Int[Array, "b s"], Float[Array, "b s"]]:
    """Return the hidden states of the MTP layer, their targets, and the weights of the targets.

    Args:
        learner: a model with an MTP layer.
        batch: `input_ids`, `segment_ids`, `position_ids`, `targets` and `weights` [b, s] of
            `next_token_batch`.
        hidden: last hidden states of the model.
    """
    (depth,) = predict_depths(learner, batch, embed_next_tokens(learner, batch), hidden, 1)
    return depth.hidden, shift_left(batch["targets"]), depth.weights


class Depth(NamedTuple):
    """The predictions of one depth.

    Attributes:
        output: the output of the layer; its state [b, s, d] at position i predicts token i + 2.
        weights: weights of these tokens [b, s].
    """

    output: BaseModelOutput
    weights: jax.Array

    @property
    def hidden(self) -> Float[Array, "b s d"]:
        """The states of the layer."""
        assert self.output.last_hidden_state is not None
        return self.output.last_hidden_state


def embed_next_tokens(learner: LanguageModel, batch: Batch) -> Float[Array, "b s d"]:
    """Return the embedding of the token after each position, which the layer reads."""
    # The last position of a segment reads a token of another segment; no position attends to it.
    return cast(Any, learner).model.embed(shift_left(batch["input_ids"]), None)


def predict_depths(
    learner: LanguageModel,
    batch: Batch,
    embeds: Float[Array, "b s d"],
    hidden: Float[Array, "b s d"],
    depths: int,
) -> list[Depth]:
    """Return the predictions of each depth.

    Args:
        learner: a model with an MTP layer.
        batch: `segment_ids`, `position_ids` and `weights` [b, s] of rows.
        embeds: see `embed_next_tokens`.
        hidden: last hidden states of the model.
        depths: k.
    """
    model, segments = cast(Any, learner), batch["segment_ids"]
    weights = shift_left(batch["weights"]) * (segments == shift_left(segments))
    predictions: list[Depth] = []
    for depth in range(depths):
        output = model.mtp(
            inputs_embeds=embeds,
            hidden=hidden,
            segment_ids=segments,
            position_ids=batch["position_ids"],
        )
        predictions.append(Depth(output, weights * (batch["position_ids"] >= depth)))
        hidden = jnp.pad(predictions[-1].hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
    return predictions


def shift_left(values: Array) -> jax.Array:
    """Return the value of the next position at each position [b, s]; 0 at the last one."""
    return jnp.pad(values[:, 1:], ((0, 0), (0, 1)))
