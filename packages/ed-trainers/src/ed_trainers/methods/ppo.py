"""Proximal policy optimization: advantages relative to the values of a value head.

Schulman et al., arXiv:1707.06347, for language as in Ziegler et al. (1909.08593): the last token of
a completion gets its score, and the divergence from a reference is subtracted from the reward of
each token. A head on the learner's hidden states computes the values.

Legend: n rows of a generation, s positions.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.outputs import CausalLMOutput, Metric
from ed_models.protocol import LanguageModel

from ed_trainers.arguments import METHODS
from ed_trainers.contract import Batch, Loss, Models
from ed_trainers.losses.policy import Policy, row_metrics
from ed_trainers.losses.ppo import (
    generalized_advantages,
    kl_estimates,
    last_of_answers,
    policy_losses,
    value_losses,
    whiten_values,
)
from ed_trainers.methods.reference import Reference
from ed_trainers.online.completions import Completions
from ed_trainers.online.phase import OnlineRun, PhaseRows, compute_policy, online_method
from ed_trainers.online.scorer import Scorer
from ed_trainers.options.online import PPOArguments
from ed_trainers.roles.value_head import VALUE_HEAD, value_head
from ed_trainers.rollout import Weights
from ed_trainers.trainer import Trainer


class PPORun(OnlineRun[PPOArguments]):
    """A run of `ppo`."""

    scorer: Scorer
    reference: Reference

    def create_parts(self, models: dict[str, LanguageModel]) -> None:
        """See `MethodRun`."""
        self.scorer = Scorer(self, models)
        self.reference = Reference(self, models)
        super().create_parts(models)


def rows(run: PPORun, completions: Completions, weights: Weights, number: int) -> PhaseRows:
    """Return one row per completion with `old_logps`, `old_values`, `advantages`, `returns` [n, s].

    The rows also have `rewards` [n], and `scored` [n], 1 for a completion with a reward.
    """
    del number
    arguments = run.arguments
    row_arrays = dict(completions.rows(arguments.row_length))
    scores = run.scorer.score(completions, row_arrays, weights)
    figures, total = scores.figures(), scores.total
    if arguments.missing_eos_penalty is not None:
        total = total - arguments.missing_eos_penalty * ~np.asarray(completions.ended)
    # A completion without a score is not trained on.
    scored = np.isfinite(total)
    row_arrays["weights"] *= scored[:, None]
    model_outputs = run.phase.ask(before_updates, row_arrays, weights)
    aims, means = jax.device_get(
        compute_targets(
            np.where(scored, total, 0).astype(np.float32),
            row_arrays["weights"],
            *(model_outputs[name] for name in ("logps", "ref_logps", "values")),
            beta=arguments.beta,
            kl_estimator=arguments.kl_estimator,
            gamma=arguments.gamma,
            lam=arguments.lam,
            whiten_rewards=arguments.whiten_rewards,
            whiten_advantages=arguments.whiten_advantages,
        )
    )
    row_arrays |= {
        "old_logps": model_outputs["logps"],
        "old_values": model_outputs["values"],
        **aims,
    }
    row_arrays["rewards"] = np.where(scored, scores.total, 0).astype(np.float32)
    row_arrays["scored"] = scored.astype(np.float32)
    return row_arrays, {**figures, **{name: float(value) for name, value in means.items()}}


def before_updates(run: PPORun, models: Models, batch: Batch) -> dict[str, jax.Array]:
    """Return log-probabilities and values of the tokens of completions, each [n, s]."""
    _, policy, values = _policy(run, models.learner, batch, None)
    model_outputs = {"logps": policy.logps, "values": values, "ref_logps": policy.logps}
    if run.arguments.has_reference:
        _, reference = compute_policy(run, models["reference"], batch)
        model_outputs["ref_logps"] = reference.logps
    return model_outputs


def loss(run: PPORun, models: Models, batch: Batch, key: jax.Array | None) -> Loss:
    """Return the clipped losses of policy and values, summed over the tokens of completions."""
    arguments, weights = run.arguments, batch["weights"]
    output, now, values = _policy(run, models.learner, batch, key)
    change = weights * (now.logps - batch["old_logps"])
    policy = policy_losses(jnp.exp(change), batch["advantages"], cliprange=arguments.cliprange)
    value = value_losses(
        values, batch["old_values"], batch["returns"], cliprange=arguments.cliprange_value
    )
    tokens = jnp.sum(weights)
    figures = {
        "loss/policy_avg": policy.losses,
        "loss/value_avg": value.losses,
        "policy/approxkl_avg": 0.5 * change**2,
        "policy/clipfrac_avg": policy.clipped,
        "val/clipfrac_avg": value.clipped,
        "val/ratio": jnp.exp(change),
    }
    metrics = {name: Metric.of(jnp.sum(weights * x), tokens) for name, x in figures.items()}
    metrics |= row_metrics(batch, now)
    losses = policy.losses + arguments.vf_coef * value.losses
    if arguments.entropy_coef:
        losses = losses - arguments.entropy_coef * now.entropy
    return Loss.of(output, jnp.sum(weights * losses), tokens, **metrics)


def _policy(
    run: PPORun, learner: LanguageModel, batch: Batch, key: jax.Array | None
) -> tuple[CausalLMOutput, Policy, jax.Array]:
    """Return the output, the figures of each token, and the value before it."""
    has_bonus = bool(run.arguments.entropy_coef)
    output, policy = compute_policy(run, learner, batch, key, entropy_gradient=has_bonus)
    assert output.last_hidden_state is not None
    return output, policy, value_head(learner)(output.last_hidden_state)


@partial(
    jax.jit,
    static_argnames=(
        *("beta", "kl_estimator", "gamma", "lam", "whiten_rewards", "whiten_advantages"),
    ),
)
def compute_targets(
    scores: jax.Array,
    weights: jax.Array,
    logps: jax.Array,
    ref_logps: jax.Array,
    values: jax.Array,
    *,
    beta: float,
    kl_estimator: str,
    gamma: float,
    lam: float,
    whiten_rewards: bool,
    whiten_advantages: bool = True,
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Return the targets of the updates of a generation, and means over its completions.

    Args:
        scores: scores of the completions, [n].
        weights: 1 for the tokens of completions, [n, s].
        logps, ref_logps: log-probabilities under the policy before the updates and the reference.
        values: value before each token, [n, s].

    Returns:
        `advantages` and `returns`, [n, s]; and figures with TRL's names.
    """
    divergence = weights * kl_estimates(logps, ref_logps, kl_estimator)
    penalties = -beta * divergence
    rewards = penalties + last_of_answers(weights) * scores[:, None]
    if whiten_rewards:
        rewards = whiten_values(rewards, weights, shift_mean=False)
    advantages = generalized_advantages(rewards, values, weights, gamma=gamma, lam=lam)
    figures = {
        "objective/kl": divergence,
        "objective/entropy": -weights * logps,
        "objective/non_score_reward": penalties,
    }
    means = {
        name: jnp.mean(jnp.sum(token_values, axis=1)) for name, token_values in figures.items()
    }
    score = jnp.mean(scores)
    return (
        {
            "advantages": whiten_values(advantages, weights) if whiten_advantages else advantages,
            "returns": weights * (advantages + values),
        },
        {
            **means,
            "objective/scores": score,
            "objective/rlhf_reward": score + means["objective/non_score_reward"],
        },
    )


PPO = online_method(
    run=PPORun,
    rows=rows,
    loss=loss,
    token_arrays=("old_logps", "old_values", "advantages", "returns"),
    extension=VALUE_HEAD,
    progress_columns=("reward", "objective/kl", "completions/mean_length", "loss"),
)


class PPOTrainer(Trainer):
    """Trains a causal model and a value head on rewards; `arguments` are `PPOArguments`."""

    entry = METHODS["ppo"]
    record = PPO
