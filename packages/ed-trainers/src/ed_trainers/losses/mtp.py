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
from ed_layers.cache.chains import ChainCache
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
    output = cast(Any, learner).mtp(
        inputs_embeds=embed_next_tokens(learner, batch),
        hidden=hidden,
        segment_ids=batch["segment_ids"],
        position_ids=batch["position_ids"],
    )
    return output.last_hidden_state, shift_left(batch["targets"]), get_target_weights(batch)


def get_target_weights(batch: Batch) -> Float[Array, "b s"]:
    """Return the weight of the token i + 2 at each position i."""
    segments = batch["segment_ids"]
    return shift_left(batch["weights"]) * (segments == shift_left(segments))


class Depth(NamedTuple):
    """The predictions of one depth.

    Attributes:
        output: the output of the layer; at depth 1 of the whole row.
        hidden: the states of the layer, which predict the targets [b, n, d].
        weights: weights of the targets [b, n].
        at: position j of each state [b, n], whose target is the token j + 2.
    """

    output: BaseModelOutput
    hidden: jax.Array
    weights: jax.Array
    at: jax.Array


def embed_next_tokens(learner: LanguageModel, batch: Batch) -> Float[Array, "b s d"]:
    """Return the embedding of the token after each position, which the layer reads."""
    # The last position of a segment reads a token of another segment; no position attends to it.
    return cast(Any, learner).model.embed(shift_left(batch["input_ids"]), None)


def predict_chains(
    learner: LanguageModel,
    batch: Batch,
    embeds: Float[Array, "b s d"],
    hidden: Float[Array, "b s d"],
    places: Int[Array, "b n"],
    depths: int,
) -> list[Depth]:
    """Return the predictions of each depth, computed as an engine drafts: see `ChainCache`.

    The draft after the token i + 1 starts at the pair of position i, depth 1. Depth j reads the
    pair of position i + j - 1, with the layer's own state in the place of the model's. It attends
    to the pairs up to position i and to the pairs of its draft.

    Args:
        learner: a model with an MTP layer.
        batch: `segment_ids`, `position_ids` and `weights` [b, s] of rows.
        embeds: see `embed_next_tokens`.
        hidden: last hidden states of the model.
        places: positions i at which drafts start.
        depths: k.
    """
    model, segments, length = cast(Any, learner), batch["segment_ids"], embeds.shape[1]
    weights, first_segments = get_target_weights(batch), take_positions(segments, places)
    output = model.mtp(
        inputs_embeds=embeds,
        hidden=hidden,
        segment_ids=segments,
        position_ids=batch["position_ids"],
        past_key_values=ChainCache.create(model.mtp.cache_specs()),
    )
    states = take_positions(output.last_hidden_state, places)
    first_weights = take_positions(weights, places)
    predictions = [Depth(output, states, first_weights, places)]
    cache = output.past_key_values.start_chains(places)
    for depth in range(1, depths):
        at = jnp.minimum(places + depth, length - 1)
        is_inside = (places + depth < length) & (take_positions(segments, at) == first_segments)
        output = model.mtp(
            inputs_embeds=take_positions(embeds, at),
            hidden=states,
            segment_ids=is_inside.astype(jnp.int32),
            position_ids=take_positions(batch["position_ids"], at),
            past_key_values=cache,
        )
        cache, states = output.past_key_values, output.last_hidden_state
        is_counted = is_inside & (first_weights > 0)
        predictions.append(Depth(output, states, take_positions(weights, at) * is_counted, at))
    return predictions


def take_positions(values: Array, places: Int[Array, "b n"]) -> jax.Array:
    """Return values [b, s, ...] at positions of each row."""
    return jnp.take_along_axis(values, places[:, :, None] if values.ndim == 3 else places, axis=1)


def shift_left(values: Array) -> jax.Array:
    """Return the value of the next position at each position [b, s]; 0 at the last one."""
    return jnp.pad(values[:, 1:], ((0, 0), (0, 1)))
