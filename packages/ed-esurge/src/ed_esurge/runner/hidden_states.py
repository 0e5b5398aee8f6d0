"""Prompt scores and pooled vectors, computed from the hidden states of a step.

Legend: T flat tokens, d hidden, v vocabulary, l alternatives, m slots.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from ed_layers.losses import logits_and_logz
from ed_layers.projections.head import Head
from jaxtyping import Array, Float, Int

from ed_esurge.runner.sampler import compute_logprobs
from ed_esurge.runner.sampler_rows import SampledTokens

# Number of tokens per block of logits: 128 x 128k in float32 are 64 MiB.
_CHUNK = 128


def score_states(
    hidden: Float[Array, "T d"], head: Head, targets: Int[Array, " T"], count: int
) -> Int[Array, "T w"]:
    """Return the scores of `targets[i]`, the token after position i.

    The logits and their sum come from the function under `ed_layers.losses.token_logprobs`, which
    is the trainers' loss: the numbers agree by construction.

    Returns:
        `SampledTokens.pack()` of each position, `w = 3 + 2 l`.
    """

    def score_chunk(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits, logz = logits_and_logz(part[0], head)
        return SampledTokens(part[1], *compute_logprobs(logits, logz, part[1], count)).pack()

    tokens = hidden.shape[0]
    size = min(_CHUNK, tokens)
    padding = -tokens % size
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, size, hidden.shape[1])
    parts = jnp.pad(targets, (0, padding)).reshape(-1, size)
    packed = jax.lax.map(score_chunk, (hidden, parts))
    return packed.reshape(tokens + padding, -1)[:tokens]


def pool_states(
    hidden: Float[Array, "T d"],
    slot_of_token: Int[Array, " T"],
    rows: Int[Array, "m 4"],
    sums: Float[Array, "m d"],
) -> tuple[Float[Array, "m d"], Float[Array, "m d"]]:
    """Pool the tokens of each slot over this step and the previous steps.

    Args:
        hidden: hidden states after the last norm.
        slot_of_token: slot of each token; m for a token that is not pooled.
        rows: four numbers of each slot: whether its sequence begins, the flat index of its last
            token, the number of tokens of its mean (0 = last token only), and whether to normalize.
        sums: sums of the previous steps.

    Returns:
        the vectors, which are complete if the prompt ends in this step, and the new sums.
    """
    begins, last, length, normalize = rows.T
    sums = jnp.where((begins > 0)[:, None], 0.0, sums)
    member = slot_of_token == jnp.arange(sums.shape[0])[:, None]
    hidden = hidden.astype(jnp.float32)
    # Padding may contain NaN or infinity, so that zero times padding is not always zero.
    hidden = jnp.where((slot_of_token < sums.shape[0])[:, None], hidden, 0.0)
    sums += jnp.dot(member.astype(jnp.float32), hidden, precision=jax.lax.Precision.HIGHEST)
    mean = sums / jnp.maximum(length, 1)[:, None]
    vectors = jnp.where((length > 0)[:, None], mean, hidden[last])
    norm = jnp.linalg.norm(vectors, axis=-1, keepdims=True)
    unit = vectors / jnp.maximum(norm, 1e-12)
    return jnp.where((normalize > 0)[:, None], unit, vectors), sums
