"""Log-probabilities of prompt tokens, from the step's hidden states.

Legend: T flat tokens, d hidden, v vocabulary, l alternatives.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from ed_layers.losses import logits_and_logz
from jaxtyping import Array, Float, Int

from ed_esurge.runner.sampler import Sampled, logprobs_of

# Tokens whose logits exist at once: 128 x 128k in float32 are 64 MiB.
CHUNK = 128


def score(
    hidden: Float[Array, "T d"],
    head: Float[Array, "d v"],
    targets: Int[Array, " T"],
    count: int,
) -> Int[Array, "T w"]:
    """What the model thought of `targets[i]`, the token after position i.

    The logits and their sum come from the function under `ed_layers.losses.token_logprobs`, which
    is the trainers' loss: the numbers agree by construction.

    Returns:
        `Sampled.pack()` of each position, `w = 3 + 2 l`.
    """

    def of_chunk(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits, logz = logits_and_logz(part[0], head)
        return Sampled(part[1], *logprobs_of(logits, logz, part[1], count)).pack()

    tokens = hidden.shape[0]
    size = min(CHUNK, tokens)
    padding = -tokens % size
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, size, hidden.shape[1])
    parts = jnp.pad(targets, (0, padding)).reshape(-1, size)
    packed = jax.lax.map(of_chunk, (hidden, parts))
    return packed.reshape(tokens + padding, -1)[:tokens]
