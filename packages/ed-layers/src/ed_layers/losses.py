"""Log-probabilities and cross-entropy from hidden states, without the [n, v] array of logits.

`token_logprobs` is the one function under every trainer's loss, `prompt_logprobs` and evaluation,
so that they agree by construction. `cross_entropy_sum` is its special case for a weighted sum,
whose gradient is computed in the forward pass: three matmuls instead of four.

Legend: n tokens, d hidden, v vocabulary, c tokens in a chunk.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ed_layers.linear import dot

# Tokens whose logits exist at the same time. 1024 x 128k float32 logits are 512 MiB.
DEFAULT_CHUNK = 1024


def token_logprobs(
    hidden: Float[Array, "n d"],
    head: Float[Array, "d v"],
    targets: Int[Array, " n"],
    *,
    chunk: int = DEFAULT_CHUNK,
) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """Log-probability of each target under softmax(hidden @ head), in nats.

    Args:
        hidden: final hidden states (after the last norm).
        head: language-model head.
        targets: token ids in [0, v); mask others to a valid id and drop their result.
        chunk: tokens at a time; the backward pass recomputes each chunk's logits.

    Returns:
        `(logp, logz)`, float32 [n]: log-probability, and the log-partition (for a z-loss).
    """

    @jax.checkpoint
    def of_chunk(carry: None, part: tuple[jax.Array, jax.Array]):
        logits, logz = logits_and_logz(part[0], head)
        return carry, (target_logit(logits, part[1]) - logz, logz)

    _, (logp, logz) = jax.lax.scan(of_chunk, None, (split(hidden, chunk), split(targets, chunk)))
    n = hidden.shape[0]
    return logp.reshape(-1)[:n], logz.reshape(-1)[:n]


def cross_entropy_sum(
    hidden: Float[Array, "n d"],
    head: Float[Array, "d v"],
    targets: Int[Array, " n"],
    weights: Float[Array, " n"],
    *,
    chunk: int = DEFAULT_CHUNK,
) -> Float[Array, ""]:
    """Weighted sum of `-logp(target)`, in nats; weight 0 drops a token.

    Differentiable in `hidden` and `head`; `weights` get no gradient.
    """
    return fused_cross_entropy(chunk, hidden, head, targets, weights)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_cross_entropy(chunk: int, hidden, head, targets, weights) -> jax.Array:
    def of_chunk(total: jax.Array, part):
        h, y, w = part
        logits, logz = logits_and_logz(h, head)
        return total + jnp.sum(w * (logz - target_logit(logits, y))), None

    parts = (split(hidden, chunk), split(targets, chunk), split(weights, chunk))
    return jax.lax.scan(of_chunk, jnp.zeros((), jnp.float32), parts)[0]


def fused_forward(chunk: int, hidden, head, targets, weights):
    """The loss and, while each chunk's softmax is at hand, its gradient for a unit cotangent."""

    def of_chunk(carry, part):
        total, d_head = carry
        h, y, w = part
        logits, logz = logits_and_logz(h, head)
        total = total + jnp.sum(w * (logz - target_logit(logits, y)))
        softmax = jnp.exp(logits - logz[:, None])
        hit = jnp.arange(logits.shape[1], dtype=y.dtype) == y[:, None]
        d_logits = (w[:, None] * (softmax - hit)).astype(h.dtype)
        d_head = d_head + jnp.matmul(h.T, d_logits, preferred_element_type=jnp.float32)
        return (total, d_head), dot(d_logits, head.T)

    parts = (split(hidden, chunk), split(targets, chunk), split(weights, chunk))
    start = (jnp.zeros((), jnp.float32), jnp.zeros(head.shape, jnp.float32))
    (total, d_head), d_hidden = jax.lax.scan(of_chunk, start, parts)
    d_hidden = d_hidden.reshape(-1, hidden.shape[1])[: hidden.shape[0]]
    return total, (d_hidden, d_head.astype(head.dtype))


def fused_backward(chunk: int, saved, cotangent):
    d_hidden, d_head = saved
    scale = cotangent.astype(jnp.float32)
    return (
        (d_hidden * scale).astype(d_hidden.dtype),
        (d_head * scale).astype(d_head.dtype),
        None,
        None,
    )


fused_cross_entropy.defvjp(fused_forward, fused_backward)


def logits_and_logz(hidden: jax.Array, head: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Float32 logits [c, v] and their log-sum-exp [c]."""
    logits = dot(hidden, head).astype(jnp.float32)
    return logits, jax.nn.logsumexp(logits, axis=-1)


def target_logit(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The logit of each row's target, [c]."""
    return jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]


def split(x: jax.Array, chunk: int) -> jax.Array:
    """[n, ...] to [n / chunk, chunk, ...], padded with zeros (weight 0, or sliced off)."""
    chunk = min(chunk, x.shape[0])
    x = jnp.pad(x, ((0, -x.shape[0] % chunk), *[(0, 0)] * (x.ndim - 1)))
    return x.reshape(-1, chunk, *x.shape[1:])
