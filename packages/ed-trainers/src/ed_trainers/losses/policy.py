"""Log-probabilities and entropy of a policy on sampled tokens, in chunks, without full logits.

The logits exist for one chunk of tokens at a time; the backward pass computes them again. As in
`token_loss`, each device processes its own tokens; the compiler partitions the vocabulary.

Legend: b rows, s positions, c tokens of a chunk, v vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from ed_infra.inputs import SAMPLING_MASKS
from ed_infra.outputs import CausalLMOutput, Metric
from ed_layers.losses import split_chunks, target_logit
from ed_layers.projections.head import Head
from ed_layers.sums import logsumexp
from ed_models.protocol import LanguageModel
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from ed_trainers.contract import Batch
from ed_trainers.losses.scoring import forward
from ed_trainers.losses.token_loss import by_device
from ed_trainers.placement import Placement

# Logits and their softmax exist at the same time, [c, v] each.
POLICY_CHUNK = 256
#: Name of the entropy over the tokens of the bonus, which decides about the next bonus.
BONUS_ENTROPY = "bonus_entropy"
# Replaces the logarithm of a probability of 0 in a product with this probability.
_LEAST = -1e30
# TRL's bounds of the logarithm of a ratio, and of the decay, in `gamma_weights`.
_LARGEST_LOG_RATIO, _LEAST_LOG_RATIO, _LEAST_DECAY = 20.0, math.log(1e-8), 1e-4


class Truncation(NamedTuple):
    """The filters of the sampling, applied after the temperature in this order.

    Attributes:
        top_k: 0 keeps all tokens.
        top_p: probability kept among the tokens of `top_k`; 1 keeps all tokens.
        min_p: smallest probability relative to the most probable token; 0 keeps all tokens.
    """

    top_k: int
    top_p: float
    min_p: float

    @property
    def active(self) -> bool:
        """Whether a token can be removed."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def log_mass(self, logps: Float[Array, "c v"]) -> Float[Array, " c"]:
        """Return the logarithm of the probability of the tokens that pass the filters.

        The filters compare sorted numbers, which exist once in memory. A compiled program may
        compute unsorted numbers twice, with different last bits, which moves the cutoff.
        """
        ordered = jnp.sort(logps, axis=-1, descending=True)
        allowed_mask = jnp.ones(ordered.shape, bool)
        if self.top_k > 0:
            allowed_mask = ordered >= ordered[:, min(self.top_k, ordered.shape[-1]) - 1, None]
        if self.top_p < 1:
            probs = jnp.where(allowed_mask, jnp.exp(ordered), 0.0)
            preceding_mass = jnp.cumsum(probs, axis=-1) - probs
            allowed_mask &= preceding_mass < self.top_p * jnp.sum(probs, axis=-1, keepdims=True)
        if self.min_p > 0:
            allowed_mask &= ordered >= ordered[:, :1] + jnp.log(self.min_p)
        # As in the engine, all tokens with the same probability are kept.
        least = jnp.min(jnp.where(allowed_mask, ordered, jnp.inf), axis=-1, keepdims=True)
        return jax.nn.logsumexp(jnp.where(ordered >= least, ordered, -jnp.inf), axis=-1)


class Policy(NamedTuple):
    """Figures of the tokens of rows, float32 [b, s], at the position that predicts the token.

    Attributes:
        logps: log-probability of the token at the sampling's temperature, in nats.
        entropy: entropy of that distribution, in nats; without gradient, unless asked for.
        sampled_logps: log-probability of the token after the filters of the sampling, without
            gradient; None without filters.
    """

    logps: Float[Array, "b s"]
    entropy: Float[Array, "b s"]
    sampled_logps: Float[Array, "b s"] | None = None


def token_policy(
    model: LanguageModel,
    rows: Batch,
    key: jax.Array | None,
    *,
    placement: Placement,
    temperature: float,
    chunk: int | None,
    truncation: Truncation | None = None,
    entropy_gradient: bool = False,
) -> tuple[CausalLMOutput, Policy]:
    """Return the output of a forward pass and the figures of each target.

    Args:
        model: learner or frozen model.
        rows: `targets` [b, s] and the inputs of the model.
        key: dropout key.
        placement: determines which devices hold which tokens.
        temperature: divisor of the logits.
        chunk: number of tokens whose logits exist at the same time on a device; None uses the
            default.
        truncation: compute `sampled_logps` with these filters.
        entropy_gradient: whether the loss reads the entropy.

    With `sampling_masks` int32 [b, s, w] in the rows (`Completions.token_masks`), all figures are
    those of the distribution over the tokens of the mask.
    """
    output = forward(model, rows, key)
    assert output.last_hidden_state is not None
    size = chunk or POLICY_CHUNK

    def local(
        hidden: jax.Array, head: Head, targets: jax.Array, *masks: jax.Array
    ) -> tuple[jax.Array, ...]:
        @jax.checkpoint
        def compute_chunk(carry: None, part: tuple[jax.Array, ...]):
            logits = head(part[0]) / temperature
            if masks:
                logits = jnp.where(
                    unpack_mask(part[2], part[1], logits.shape[-1]), logits, -jnp.inf
                )
            # The engine subtracts the maximum first, too: the bits are then equal.
            logits = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
            with head.kernels():
                logp = logits - logsumexp(logits)[:, None]
            fixed = jax.lax.stop_gradient(logp)
            measured = logp if entropy_gradient else fixed
            entropy = -jnp.sum(jnp.exp(measured) * jnp.maximum(measured, _LEAST), axis=-1)
            target_logp = target_logit(logp, part[1])
            if truncation is None:
                return carry, (target_logp, entropy)
            # Due to rounding the filters may exclude the sampled token: the bound is 0.
            truncated = jax.lax.stop_gradient(target_logp) - truncation.log_mass(fixed)
            return carry, (target_logp, entropy, jnp.minimum(truncated, 0.0))

        flat = hidden.reshape(-1, hidden.shape[-1])
        parts = (split_chunks(flat, size), split_chunks(targets.reshape(-1), size))
        parts += tuple(split_chunks(mask.reshape(-1, mask.shape[-1]), size) for mask in masks)
        _, chunk_outputs = jax.lax.scan(compute_chunk, None, parts)
        return tuple(x.reshape(-1)[: targets.size].reshape(targets.shape) for x in chunk_outputs)

    targets = rows["targets"]
    sharding = placement.sharding(targets.shape)
    spec = sharding.spec
    masks = () if SAMPLING_MASKS not in rows else (rows[SAMPLING_MASKS],)
    specs = (spec, PartitionSpec(), spec, *(spec for _ in masks))
    run = by_device(local, sharding, specs, spec)
    return output, Policy(*run(output.last_hidden_state, model.head(), targets, *masks))


def unpack_mask(
    mask: Int[Array, "c w"], targets: Int[Array, " c"], vocabulary: int
) -> Bool[Array, "c v"]:
    """Return which tokens a mask contains; the targets, and all tokens of an empty mask (padding)
    are always among them."""
    bits = (mask[:, :, None] >> jnp.arange(32)) & 1
    allowed_mask = bits.reshape(len(mask), -1)[:, :vocabulary] > 0
    every = jax.lax.broadcasted_iota(jnp.int32, allowed_mask.shape, 1)
    return (
        allowed_mask | (every == targets[:, None]) | ~jnp.any(allowed_mask, axis=-1, keepdims=True)
    )


def old_logps(batch: Batch, policy: Policy) -> jax.Array:
    """Return the log-probabilities before the steps; by default the present ones."""
    return batch.get("old_logps", jax.lax.stop_gradient(policy.logps))


def select_uncertain_tokens(
    entropy: Float[Array, "b s"], weights: Float[Array, "b s"], share: float
) -> Float[Array, "b s"]:
    """Return 1 for the tokens with the highest entropy, 0 for the others (arXiv:2506.01939).

    The bound is the quantile `1 - share` of the entropies of all tokens of a microbatch, with
    linear interpolation, as in TRL.

    Args:
        entropy: entropy of each token.
        weights: above 0 for the tokens of completions.
        share: share of the tokens, 0 to 1. With 0, the token with the highest entropy remains.
    """
    entropy, token_mask = jax.lax.stop_gradient(entropy), weights > 0
    ordered = jnp.sort(jnp.where(token_mask, entropy, jnp.inf).reshape(-1))
    last = jnp.maximum(jnp.sum(token_mask) - 1, 0)
    place = (1 - share) * last.astype(jnp.float32)
    below = jnp.floor(place).astype(jnp.int32)
    low, high = ordered[below], ordered[jnp.minimum(below + 1, last)]
    bound = low + (high - low) * (place - below)
    return (token_mask & (entropy >= bound)).astype(weights.dtype)


def gamma_weights(
    log_ratios: Float[Array, "b s"],
    corrections: Float[Array, "b s"],
    advantages: Float[Array, "b 1"],
    weights: Float[Array, "b s"],
    *,
    positive: tuple[float, float],
    negative: tuple[float, float],
) -> Float[Array, "b 1"]:
    """Return the weight `exp(l) * r^k * exp(-l * r)` of each completion (VESPO, arXiv:2602.10693).

    r is the ratio of the probabilities of the completion, the product over its tokens. At r = 1
    the weight is 1. No gradient flows through it. The bounds of the logarithms are TRL's.

    Args:
        log_ratios: log-ratio of each token, present to old policy.
        corrections: ratio of each token, old policy to the policy that sampled it; 1 elsewhere.
        advantages: of each completion.
        weights: above 0 for the tokens of completions.
        positive: k and l for advantages of at least 0.
        negative: k and l for the other advantages.
    """
    bounded = jnp.clip(log_ratios, -_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO) * weights
    sampled = jnp.clip(jnp.log(corrections), _LEAST_LOG_RATIO, _LARGEST_LOG_RATIO)
    log_ratio = jnp.sum(bounded + sampled, axis=-1, keepdims=True)
    log_ratio = jnp.clip(log_ratio, _LEAST_LOG_RATIO, _LARGEST_LOG_RATIO)
    power = jnp.where(advantages >= 0, positive[0], negative[0])
    decay = jnp.maximum(jnp.where(advantages >= 0, positive[1], negative[1]), _LEAST_DECAY)
    gamma = jnp.exp(decay + power * log_ratio - decay * jnp.exp(log_ratio))
    return jax.lax.stop_gradient(jnp.where(jnp.isfinite(gamma), gamma, 0.0))


def select_near_completions(
    drift: Float[Array, "b s"],
    advantages: Float[Array, "b 1"],
    tokens: Float[Array, " b"],
    threshold: float,
) -> Float[Array, "b 1"]:
    """Return 0 for completions with a negative advantage that the policy left, 1 for the others.

    Args:
        drift: loss of log-probability of each token since it was sampled; 0 elsewhere.
        advantages: of each completion.
        tokens: number of tokens of each completion.
        threshold: largest mean drift of a token, in nats.
    """
    drift = jax.lax.stop_gradient(drift)
    mean = jnp.sum(drift, axis=-1, keepdims=True) / jnp.maximum(tokens[:, None], 1)
    return ((advantages >= 0) | (mean <= threshold)).astype(jnp.float32)


def count_scored_rows(batch: Batch) -> Batch:
    """Return a batch in which rows without a reward have no tokens and are not present."""
    scored = batch["scored"]
    return batch.replace(
        weights=batch["weights"] * scored[:, None], present=batch["present"] * scored
    )


def row_metrics(batch: Batch, policy: Policy) -> dict[str, Metric]:
    """Return the reward of the rows and the entropy of their tokens."""
    weights, scored = batch["weights"], batch["scored"]
    return {
        "reward": Metric.of(jnp.sum(batch["rewards"] * scored), jnp.sum(scored)),
        "entropy": Metric.of(jnp.sum(policy.entropy * weights), jnp.sum(weights)),
    }


def clip_metrics(
    ratios: jax.Array, advantages: jax.Array, weights: jax.Array, lower: float, upper: float
) -> dict[str, Metric]:
    """Return the shares of clipped ratios, with TRL's names; all arrays have one shape."""
    low = ((ratios < lower) & (advantages < 0)).astype(jnp.float32)
    high = ((ratios > upper) & (advantages > 0)).astype(jnp.float32)
    total = jnp.sum(weights)
    return {
        "clip_ratio/low_mean": Metric.of(jnp.sum(low * weights), total),
        "clip_ratio/high_mean": Metric.of(jnp.sum(high * weights), total),
        "clip_ratio/region_mean": Metric.of(jnp.sum((low + high) * weights), total),
    }
