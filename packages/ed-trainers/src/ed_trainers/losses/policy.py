"""What a policy says of the tokens that it sampled, in chunks: never full logits.

The logits exist for one chunk of tokens at a time; the backward pass makes them again. As in
`token_loss`, each device walks over its own tokens; the vocabulary stays with the compiler.

Legend: b rows, s positions, c tokens of a chunk, v vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from ed_infra.outputs import CausalLMOutput
from ed_layers.head import Head
from ed_layers.losses import split, target_logit
from ed_models.protocol import LanguageModel
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from ed_trainers.contract import Batch
from ed_trainers.losses.scoring import forward
from ed_trainers.losses.token_loss import by_device
from ed_trainers.placement import Placement

# Logits and their softmax exist at once, [c, v] each.
DEFAULT_CHUNK = 256


class Policy(NamedTuple):
    """Figures of the tokens of rows, each float32 [b, s], at the position that predicts the token.

    Attributes:
        logps: log-probability of the token, in nats.
        entropy: of the distribution that it came from, in nats; without gradient.
    """

    logps: Float[Array, "b s"]
    entropy: Float[Array, "b s"]


def token_policy(
    model: LanguageModel,
    rows: Batch,
    key: jax.Array | None,
    *,
    placement: Placement,
    temperature: float,
    chunk: int | None,
) -> tuple[CausalLMOutput, Policy]:
    """Return the output of a forward pass, and the figures of each target.

    Args:
        model: learner or frozen model.
        rows: `input_ids`, `segment_ids`, `position_ids`, `targets` [b, s].
        key: dropout key.
        placement: says which devices hold which tokens.
        temperature: the logits are divided by it.
        chunk: tokens whose logits exist at once on a device; None lets the loss choose.
    """
    output = forward(model, rows, key)
    assert output.last_hidden_state is not None
    size = chunk or DEFAULT_CHUNK

    def local(hidden: jax.Array, head: Head, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        @jax.checkpoint
        def of_chunk(carry: None, part: tuple[jax.Array, jax.Array]):
            logits = head(part[0]) / temperature
            logp = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
            fixed = jax.lax.stop_gradient(logp)
            entropy = -jnp.sum(jnp.exp(fixed) * fixed, axis=-1)
            return carry, (target_logit(logp, part[1]), entropy)

        flat = hidden.reshape(-1, hidden.shape[-1])
        parts = split(flat, size), split(targets.reshape(-1), size)
        _, found = jax.lax.scan(of_chunk, None, parts)
        logps, entropy = (x.reshape(-1)[: targets.size].reshape(targets.shape) for x in found)
        return logps, entropy

    targets = rows["targets"]
    sharding = placement.sharding(targets.shape, stacked=False)
    spec = sharding.spec
    run = by_device(local, sharding, (spec, PartitionSpec(), spec), spec)
    return output, Policy(*run(output.last_hidden_state, model.head(), targets))
