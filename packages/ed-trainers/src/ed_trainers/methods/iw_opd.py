"""Importance-weighted on-policy distillation: early tokens of the learner's completions count more.

Xie et al., arXiv:2606.22600, with the formula of TRL's trainer. The advantage of a token is the
log-ratio of the teacher to the learner that sampled the token. The weight of a token is
`1 + gamma * (1 - share)`, and `share` is the share of the absolute advantages of its completion
that belong to earlier tokens. The loss is that of a policy gradient with these advantages.

Legend: n completions, b rows, s positions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.outputs import Metric
from jaxtyping import Float

from ed_trainers.arguments import METHODS
from ed_trainers.contract import Batch, Loss, Models
from ed_trainers.online.completions import Completions
from ed_trainers.online.phase import OnlineRun, PhaseRows, compute_policy, online_method
from ed_trainers.options.distillation import IWOPDArguments
from ed_trainers.rollout import Weights
from ed_trainers.trainer import Trainer


def weigh_tokens(
    advantages: Float[np.ndarray, "n s"], gamma: float, epsilon: float
) -> Float[np.ndarray, "n s"]:
    """Return the weight of each token of a completion, from 1 + `gamma` to 1.

    Args:
        advantages: advantage of each token; 0 at other positions.
        gamma: additional weight of the first token.
        epsilon: smallest divisor of the share.
    """
    sizes = np.abs(advantages)
    earlier = np.cumsum(sizes, axis=-1) - sizes
    total = np.maximum(sizes.sum(axis=-1, keepdims=True), epsilon)
    return 1 + gamma * (1 - earlier / total)


def rows(
    run: OnlineRun[IWOPDArguments], completions: Completions, weights: Weights, number: int
) -> PhaseRows:
    """Return the rows of the completions, with the weighted `advantages` and the `teacher_logps`,
    float32 [n, s]."""
    del number
    options = run.arguments
    row_arrays = dict(completions.rows(options.row_length))
    logps = run.phase.ask(_score_tokens, row_arrays, weights)
    mask = row_arrays["weights"] > 0
    advantages = np.where(mask, logps["teacher_logps"] - logps["old_logps"], 0).astype(np.float64)
    token_weights = weigh_tokens(advantages, options.iw_opd_gamma, options.iw_opd_epsilon)
    weighted = advantages * token_weights
    row_arrays["advantages"] = weighted.astype(np.float32)
    row_arrays["teacher_logps"] = np.where(mask, logps["teacher_logps"], 0).astype(np.float32)
    figures = {
        "mean_advantage": weighted[mask].mean(),
        "mean_abs_advantage": np.abs(advantages[mask]).mean(),
        "mean_weight": token_weights[mask].mean(),
        "min_weight": token_weights[mask].min(),
        "max_weight": token_weights[mask].max(),
    }
    return row_arrays, {f"iw_opd/{name}": float(value) for name, value in figures.items()}


def _score_tokens(
    run: OnlineRun[IWOPDArguments], models: Models, batch: Batch
) -> dict[str, jax.Array]:
    """Return `old_logps` of the learner and `teacher_logps` of rows, [n, s]."""
    teacher = models["teacher"]
    sizes = [model.head().vocab_size for model in (models.learner, teacher)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"the teacher has {sizes[1]} tokens, the student {sizes[0]}: the teacher scores the "
            "student's tokens, so both need one tokenizer"
        )
    return {
        "old_logps": compute_policy(run, models.learner, batch)[1].logps,
        "teacher_logps": compute_policy(run, teacher, batch)[1].logps,
    }


def loss(
    run: OnlineRun[IWOPDArguments], models: Models, batch: Batch, key: jax.Array | None
) -> Loss:
    """Return the sum over the tokens of `-advantage * log p(token)`.

    `kl` is the mean log-ratio of the learner to the teacher; with the samples of the present
    weights, as in an evaluation, it estimates the reverse divergence.
    """
    output, policy = compute_policy(run, models.learner, batch, key)
    weights = batch["weights"]
    count = jnp.sum(weights)
    total = -jnp.sum(weights * batch["advantages"] * policy.logps)
    kl = Metric.of(jnp.sum(weights * (policy.logps - batch["teacher_logps"])), count)
    entropy = Metric.of(jnp.sum(weights * policy.entropy), count)
    return Loss.of(output, total, count, kl=kl, entropy=entropy)


IW_OPD = online_method(
    run=OnlineRun[IWOPDArguments],
    rows=rows,
    loss=loss,
    token_arrays=("advantages", "teacher_logps"),
    progress_columns=("kl", "entropy", "completions/mean_length", "loss"),
)


class IWOPDTrainer(Trainer):
    """Trains a model on the log-ratios of the model `"teacher"` to it, on its own completions.

    `arguments` are `IWOPDArguments`; the teacher has the student's vocabulary.
    """

    entry = METHODS["iw_opd"]
    record = IW_OPD
