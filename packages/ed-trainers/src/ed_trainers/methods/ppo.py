"""Proximal policy optimization: completions are made likelier by how far they beat what was hoped.

Schulman et al., arXiv:1707.06347, for language as in Ziegler et al. (1909.08593): the score of a
completion stands at its last token, and each token loses its divergence from a reference. The
values that advantages are counted from come from a head on the learner's hidden states.

Legend: n rows of a generation, s positions.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.outputs import CausalLMOutput, Metric
from ed_models.protocol import LanguageModel
from flax import nnx

from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, Loss, Models
from ed_trainers.losses.policy import Policy
from ed_trainers.losses.ppo import (
    generalized_advantages,
    kl_estimates,
    last_of_answers,
    policy_losses,
    value_losses,
    whitened,
)
from ed_trainers.online.completions import Completions
from ed_trainers.online.groups import row_metrics
from ed_trainers.online.rewarded import RewardedTrainer
from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.ppo import PPOArguments
from ed_trainers.roles.value_head import (
    NAME,
    PolicyWeights,
    save_value_head,
    split_with_head,
    value_head,
    with_value_head,
    without_value_head,
)
from ed_trainers.rollout import Weights
from ed_trainers.state import EasyDeLState


class PPOTrainer(RewardedTrainer):
    """Raises the rewards of the learner's completions, near a reference; `arguments`: PPOArguments.

    `model` is the causal model; what learns has a value head beside it.
    """

    arguments_class: ClassVar[type[TrainingArguments]] = PPOArguments
    arguments: PPOArguments
    progress_columns: ClassVar[tuple[str, ...]] = (
        "reward",
        "objective/kl",
        "completions/mean_length",
        "loss",
    )

    def __init__(
        self, arguments: PPOArguments, model: LanguageModel | EasyDeLState, *given: Any, **more: Any
    ):
        if isinstance(model, EasyDeLState):
            raise ConfigError("ppo puts a value head beside the model: give the model, not a state")
        super().__init__(arguments, with_value_head(model, arguments.value_head), *given, **more)

    @property
    def model(self) -> LanguageModel:
        """The causal model with its present weights; see `Trainer.model`."""
        return without_value_head(super().model)

    def _save_beside(self, directory: Path) -> None:
        super()._save_beside(directory)
        save_value_head(super().model, directory)

    def _first_state(self) -> EasyDeLState:
        rules = self.arguments.trainable_rules
        if rules:
            state = EasyDeLState.create(model=self._model, trainable=rules)
        else:
            graphdef, params, other = split_with_head(self._model)
            state = EasyDeLState.create(graphdef=graphdef, graphstate=params, graphother=other)
        return self.beside_reference(state)

    def learned(self) -> nnx.State:
        """See `SyncedReference.learned`; the head is the learner's own."""
        flat = nnx.to_flat_state(super().learned())
        return nnx.from_flat_state([(path, x) for path, x in flat if path[0] != NAME])

    def complete(self, batch: HostBatch, weights: Weights, **settings: Any) -> Completions:
        """See `OnlineTrainer.complete`; whoever samples sees the causal model alone."""
        return super().complete(batch, PolicyWeights(weights), **settings)

    def rows_of(
        self, completions: Completions, weights: Weights
    ) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Add to each row `old_logps`, `old_values`, `advantages` and `returns`, [n, s].

        And `rewards` [n], with `scored` [n], 1 where anything gives one.
        """
        arguments = self.arguments
        rows = completions.rows(arguments.row_length)
        scores = self.score(completions, rows, weights)
        figures, total = scores.figures(), scores.total
        if arguments.missing_eos_penalty is not None:
            total = total - arguments.missing_eos_penalty * ~np.asarray(completions.ended)
        # A completion that nothing scores is none to learn from.
        scored = np.isfinite(total)
        rows["weights"] *= scored[:, None]
        asked = self.compute(self.before_updates, rows, weights)
        aims, means = jax.device_get(
            aims_of(
                np.where(scored, total, 0).astype(np.float32),
                rows["weights"],
                *(asked[name] for name in ("logps", "ref_logps", "values")),
                beta=arguments.beta,
                kl_estimator=arguments.kl_estimator,
                gamma=arguments.gamma,
                lam=arguments.lam,
                whiten_rewards=arguments.whiten_rewards,
            )
        )
        rows |= {"old_logps": asked["logps"], "old_values": asked["values"], **aims}
        rows["rewards"] = np.where(scored, scores.total, 0).astype(np.float32)
        rows["scored"] = scored.astype(np.float32)
        return rows, {**figures, **{name: float(value) for name, value in means.items()}}

    def before_updates(self, models: Models, batch: Batch) -> dict[str, jax.Array]:
        """What models say of the tokens of completions that were sampled, each [n, s]."""
        _, policy, values = self._policy(models.learner, batch, None)
        asked = {"logps": policy.logps, "values": values, "ref_logps": policy.logps}
        if self.arguments.has_reference:
            _, reference = self.policy(models["reference"], batch)
            asked["ref_logps"] = reference.logps
        return asked

    def loss(self, models: Models, batch: Batch, key: jax.Array | None) -> Loss:
        """Return the clipped losses of policy and values, summed over the completions' tokens."""
        arguments, weights = self.arguments, batch["weights"]
        output, now, values = self._policy(models.learner, batch, key)
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
        return Loss.of(output, jnp.sum(weights * losses), tokens, **metrics)

    def _policy(
        self, learner: LanguageModel, batch: Batch, key: jax.Array | None
    ) -> tuple[CausalLMOutput, Policy, jax.Array]:
        """The output, and what it says of each token, and the value before it."""
        output, policy = self.policy(learner, batch, key)
        assert output.last_hidden_state is not None
        return output, policy, value_head(learner)(output.last_hidden_state)


@partial(jax.jit, static_argnames=("beta", "kl_estimator", "gamma", "lam", "whiten_rewards"))
def aims_of(
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
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """What the updates aim at, of a whole generation, and means over its completions.

    Args:
        scores: of the completions, [n].
        weights: 1 for their tokens, [n, s], as the others are.
        logps, ref_logps: of the tokens, under the policy that sampled them and the reference.
        values: before each token.

    Returns:
        `advantages` and `returns`, [n, s]; and figures by TRL's names.
    """
    divergence = weights * kl_estimates(logps, ref_logps, kl_estimator)
    penalties = -beta * divergence
    rewards = penalties + last_of_answers(weights) * scores[:, None]
    if whiten_rewards:
        rewards = whitened(rewards, weights, shift_mean=False)
    advantages = generalized_advantages(rewards, values, weights, gamma=gamma, lam=lam)
    figures = {
        "objective/kl": divergence,
        "objective/entropy": -weights * logps,
        "objective/non_score_reward": penalties,
    }
    means = {name: jnp.mean(jnp.sum(of_tokens, axis=1)) for name, of_tokens in figures.items()}
    score = jnp.mean(scores)
    return (
        {
            "advantages": whitened(advantages, weights),
            "returns": weights * (advantages + values),
        },
        {
            **means,
            "objective/scores": score,
            "objective/rlhf_reward": score + means["objective/non_score_reward"],
        },
    )
