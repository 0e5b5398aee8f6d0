"""The CTC loss (Graves et al. 2006): the log-probability of labels over all their alignments.

Legend: b rows, n samples, t time steps, l labels, v vocabulary.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int


def ctc_losses(
    logits: Float[Array, "b t v"],
    steps: Int[Array, " b"],
    labels: Int[Array, "b l"],
    lengths: Int[Array, " b"],
    *,
    blank: int,
    zero_infinity: bool,
) -> Float[Array, " b"]:
    """Return `-log p(labels)` of each row in nats, as `torch.nn.functional.ctc_loss`.

    Args:
        logits: scores of the labels.
        steps: time steps of each row; later ones are padding.
        labels: the labels, with padding at the end.
        lengths: labels of each row.
        blank: the label of no output.
        zero_infinity: whether a row without an alignment has the loss and the gradient 0 instead of
            infinity.
    """
    logit_padding = jnp.arange(logits.shape[1]) >= steps[:, None]
    padding = jnp.arange(labels.shape[1]) >= lengths[:, None]
    possible = _count_needed_steps(labels, lengths) <= steps
    # Padded labels are read, but have no effect; rows without an alignment have no gradient.
    safe = jnp.where(padding, 0 if blank else 1, labels)
    logits = jnp.where(possible[:, None, None], logits, 0)
    losses = optax.ctc_loss(
        logits,
        logit_padding.astype(logits.dtype),
        safe,
        padding.astype(logits.dtype),
        blank_id=blank,
    )
    return jnp.where(possible, losses, 0.0 if zero_infinity else jnp.inf)


def _count_needed_steps(labels: Int[Array, "b l"], lengths: Int[Array, " b"]) -> Int[Array, " b"]:
    """Return the fewest time steps of an alignment: one per label, and between equal labels."""
    pair_mask = jnp.arange(1, labels.shape[1]) < lengths[:, None]
    return lengths + jnp.sum((labels[:, 1:] == labels[:, :-1]) & pair_mask, axis=1)


def steps_needed(labels: Int[np.ndarray, "b l"], lengths: Int[np.ndarray, " b"]) -> np.ndarray:
    """Return the fewest time steps of an alignment of each row, on the host."""
    pair_mask = np.arange(1, labels.shape[1]) < lengths[:, None]
    return lengths + np.sum((labels[:, 1:] == labels[:, :-1]) & pair_mask, axis=1)
