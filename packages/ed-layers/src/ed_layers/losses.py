"""Log-probabilities and cross-entropy from hidden states, without the [n, v] array of logits.

Every trainer's loss, `prompt_logprobs` and evaluation call `token_logprobs`, so they agree by
construction. `cross_entropy_sum` is the special case of a weighted sum: it computes the gradient in
the forward pass, with three matmuls instead of four.

Legend: n tokens, d hidden, v vocabulary, c tokens in a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ed_layers.projections.dot import Product, Transposed, Weight
from ed_layers.projections.head import Head
from ed_layers.projections.matmul import gradient_of_matrix, matmul
from ed_layers.sums import logsumexp

# Tokens whose logits exist at the same time. 1024 x 128k float32 logits are 512 MiB.
DEFAULT_CHUNK = 1024


def token_logprobs(
    hidden: Float[Array, "n d"],
    head: Head | Weight,
    targets: Int[Array, " n"],
    *,
    chunk: int = DEFAULT_CHUNK,
) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """Return the log-probability of each target under softmax(hidden @ head), in nats.

    Args:
        hidden: final hidden states (after the last norm).
        head: language-model head, or its matrix [d, v].
        targets: token ids in [0, v); replace ignored ids by a valid id and drop their result.
        chunk: number of tokens per chunk; the backward pass recomputes the logits of each chunk.

    Returns:
        `(logp, logz)`, float32 [n]: log-probability, and the log-partition (for a z-loss).
    """

    @jax.checkpoint
    def compute_chunk(carry: None, part: tuple[jax.Array, jax.Array]):
        logits, logz = logits_and_logz(part[0], head)
        return carry, (target_logit(logits, part[1]) - logz, logz)

    _, (logp, logz) = jax.lax.scan(
        compute_chunk, None, (split_chunks(hidden, chunk), split_chunks(targets, chunk))
    )
    n = hidden.shape[0]
    return logp.reshape(-1)[:n], logz.reshape(-1)[:n]


class TokenLoss(NamedTuple):
    """Additional terms of the loss of a token.

    Attributes:
        label_smoothing: fraction of the target probability that is spread evenly over the
            vocabulary (Szegedy et al. 2016), as in `torch.nn.CrossEntropyLoss`.
        z_loss: factor on the square of the log-partition, which keeps logits near zero (PaLM).
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def value(
        self, logits: Float[Array, "c v"], logz: Float[Array, " c"], targets: Int[Array, " c"]
    ) -> Float[Array, " c"]:
        """Return the loss of each token of a chunk, in nats."""
        score = target_logit(logits, targets)
        if self.label_smoothing:
            spread = jnp.mean(logits, axis=-1) - score
            score = score + self.label_smoothing * spread
        return logz - score + self.z_loss * jnp.square(logz)

    def gradient(
        self, softmax: Float[Array, "c v"], logz: Float[Array, " c"], targets: Int[Array, " c"]
    ) -> Float[Array, "c v"]:
        """Return the gradient of `value` with respect to the logits."""
        v = softmax.shape[1]
        target_probs = (jnp.arange(v, dtype=targets.dtype) == targets[:, None]).astype(
            softmax.dtype
        )
        if self.label_smoothing:
            target_probs = (1 - self.label_smoothing) * target_probs + self.label_smoothing / v
        if self.z_loss:
            softmax = softmax * (1 + 2 * self.z_loss * logz)[:, None]
        return softmax - target_probs


def cross_entropy_sum(
    hidden: Float[Array, "n d"],
    head: Head | Weight,
    targets: Int[Array, " n"],
    weights: Float[Array, " n"],
    *,
    chunk: int = DEFAULT_CHUNK,
    loss: TokenLoss = TokenLoss(),  # noqa: B008 - a tuple of numbers
) -> Float[Array, ""]:
    """Return the weighted sum of `-logp(target)` in nats; a token with weight 0 is ignored.

    The result is differentiable in `hidden` and `head`, not in `weights`. `loss` adds its terms to
    each token.
    """
    return fused_cross_entropy((chunk, loss), hidden, Head.of(head), targets, weights)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_cross_entropy(
    static: tuple[int, TokenLoss], hidden, head: Head, targets, weights
) -> jax.Array:
    chunk, loss = static

    def compute_chunk(total: jax.Array, part):
        h, y, w = part
        logits, logz = logits_and_logz(h, head)
        return total + jnp.sum(w * loss.value(logits, logz, y)), None

    parts = (
        split_chunks(hidden, chunk),
        split_chunks(targets, chunk),
        split_chunks(weights, chunk),
    )
    return jax.lax.scan(compute_chunk, jnp.zeros((), jnp.float32), parts)[0]


def fused_forward(static: tuple[int, TokenLoss], hidden, head: Head, targets, weights):
    """Return the loss, and its gradient for a unit cotangent from the same softmax."""
    chunk, loss = static
    leaves, treedef = jax.tree.flatten(head)
    learned = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

    def compute_chunk(carry, part):
        total, sums = carry
        h, y, w = part
        logits, pull = logits_and_pullback(head, h)
        top = jnp.max(logits, axis=-1, keepdims=True)
        powers = jnp.exp(logits - top)
        sums_of_powers = jnp.sum(powers, axis=-1, keepdims=True)
        logz = (top + jnp.log(sums_of_powers))[:, 0]
        total = total + jnp.sum(w * loss.value(logits, logz, y))
        d_head, d_h = pull(w[:, None] * loss.gradient(powers / sums_of_powers, logz, y))
        grads = jax.tree.leaves(d_head)
        return (total, [s + grads[i] for s, i in zip(sums, learned, strict=True)]), d_h

    parts = (
        split_chunks(hidden, chunk),
        split_chunks(targets, chunk),
        split_chunks(weights, chunk),
    )
    zeros = [jnp.zeros(leaves[i].shape, jnp.float32) for i in learned]
    (total, sums), d_hidden = jax.lax.scan(
        compute_chunk, (jnp.zeros((), jnp.float32), zeros), parts
    )
    d_hidden = d_hidden.reshape(-1, hidden.shape[1])[: hidden.shape[0]]
    # Integers (codes of a quantized head) have no gradient; jax represents that as float0.
    d_leaves: list[Any] = [np.zeros(leaf.shape, jax.dtypes.float0) for leaf in leaves]
    for i, total_of_leaf in zip(learned, sums, strict=True):
        d_leaves[i] = total_of_leaf.astype(leaves[i].dtype)
    return total, (d_hidden, jax.tree.unflatten(treedef, d_leaves))


def fused_backward(static: tuple[int, TokenLoss], saved, cotangent):
    scale = cotangent.astype(jnp.float32)

    def scale_gradient(grad: jax.Array) -> jax.Array:
        return grad if grad.dtype == jax.dtypes.float0 else (grad * scale).astype(grad.dtype)

    d_hidden, d_head = jax.tree.map(scale_gradient, saved)
    return d_hidden, d_head, None, None


fused_cross_entropy.defvjp(fused_forward, fused_backward)


def logits_and_pullback(
    head: Head, hidden: Float[Array, "c d"]
) -> tuple[Float[Array, "c v"], Callable[[jax.Array], tuple[Head, jax.Array]]]:
    """Return the float32 logits of a chunk, and the function from their gradient to the gradients
    of head and hidden.

    The gradient of a plain matrix is summed over the chunk in float32 for every dtype.
    """
    weight, tail = head.weight, replace(head, weight=None)
    transposed = isinstance(weight, Transposed)
    if isinstance(weight, Product) and not transposed:
        return jax.vjp(lambda head, h: head(h), head, hidden)
    matrix = weight.rows if transposed else weight
    logits, pull_tail = jax.vjp(
        lambda tail, scores: tail.finish(scores), tail, head.product(hidden)
    )

    def pull(d_logits: jax.Array) -> tuple[Head, jax.Array]:
        d_tail, d_scores = pull_tail(d_logits)
        d_scores = d_scores.astype(hidden.dtype)
        d_matrix = gradient_of_matrix(
            hidden, d_scores, transposed=transposed, precision=head.precision
        )
        d_weight = Transposed(d_matrix) if transposed else d_matrix
        d_hidden = matmul(d_scores, matrix, transposed=not transposed, precision=head.precision)
        return replace(d_tail, weight=d_weight), d_hidden

    return logits, pull


def logits_and_logz(hidden: jax.Array, head: Head | Weight) -> tuple[jax.Array, jax.Array]:
    """Return the float32 logits [c, v] and their log-sum-exp [c]."""
    head = Head.of(head)
    logits = head(hidden)
    with head.kernels():
        return logits, logsumexp(logits)


def target_logit(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the logit of each row's target, [c]."""
    return jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]


def split_chunks(x: jax.Array, chunk: int) -> jax.Array:
    """Reshape [n, ...] to [n / chunk, chunk, ...], padded with zeros (weight 0, or sliced off)."""
    chunk = min(chunk, x.shape[0])
    x = jnp.pad(x, ((0, -x.shape[0] % chunk), *[(0, 0)] * (x.ndim - 1)))
    return x.reshape(-1, chunk, *x.shape[1:])
