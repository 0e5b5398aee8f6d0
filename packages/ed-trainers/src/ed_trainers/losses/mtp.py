"""The loss of the MTP layer: the cross-entropy of the token after the next one.

Position i reads the hidden state of token i and the token i + 1, and predicts the label of token
i + 2 (`ed_models.body.mtp`). A position counts if the label counts and the three tokens are in one
segment. The loss is that of DeepSeek-V3 (arXiv:2412.19437, equations 24 and 25) with one layer:
gradients reach the model through its hidden states, embedding and head, as far as these are
trained.

Legend: b rows, s positions, d hidden.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
from ed_infra.errors import ConfigError
from ed_models.adapters.lora import has_lora
from ed_models.body.mtp import MTP
from ed_models.protocol import LanguageModel
from flax import nnx
from jaxtyping import Array, Float, Int

from ed_trainers.contract import Batch

#: Name of the term of the loss.
MTP_LOSS = "mtp_loss"


def check_mtp_layer(learner: LanguageModel) -> None:
    """Check that a model has an MTP layer that can be trained.

    Raises:
        ConfigError: the model has no layer, or has adapters, which are trained alone.
    """
    if not hasattr(learner, MTP):
        raise ConfigError(
            f"mtp_loss_weight trains the MTP layer, and this {type(learner).__name__} was loaded "
            "without it: load the model with mtp_head='stored', or with mtp_head='new' if the "
            "checkpoint has no tensors mtp.*"
        )
    if has_lora(cast(nnx.Module, learner)):
        raise ConfigError(
            "mtp_loss_weight trains the MTP layer, and a model with adapters trains only these: "
            "omit the adapters, and train the layer alone with trainable_rules [['^mtp', true]]"
        )


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
    model = cast(Any, learner)
    segments = batch["segment_ids"]
    # The last position of a segment reads a token of another segment; no position attends to it.
    embeds = model.model.embed(shift_left(batch["input_ids"]), None)
    output = model.mtp(
        inputs_embeds=embeds,
        hidden=hidden,
        segment_ids=segments,
        position_ids=batch["position_ids"],
    )
    weights = shift_left(batch["weights"]) * (segments == shift_left(segments))
    return output.last_hidden_state, shift_left(batch["targets"]), weights


def shift_left(values: Array) -> jax.Array:
    """Return the value of the next position at each position [b, s]; 0 at the last one."""
    return jnp.pad(values[:, 1:], ((0, 0), (0, 1)))
