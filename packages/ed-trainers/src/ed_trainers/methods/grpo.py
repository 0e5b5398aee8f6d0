"""Group relative policy optimization: an advantage is a reward relative to the group's rewards.

Shao et al., arXiv:2402.03300; `GRPOArguments` has the related losses of `loss_type`. Formulas as in
TRL's trainer: the ratio is clipped as in PPO, and the divergence from the reference, estimated as
`exp(d) - d - 1`, is added to the loss of each token. Truncated importance sampling between engine
and trainer is from Yao et al. (2025).

`rlvr` (Lambert et al., arXiv:2411.15124) is the same method with rewards that rules verify, and
`gspo` (Zheng et al., arXiv:2507.18071) the same method with one ratio for each completion.

Legend: n completions, s positions, p prompts, g completions of a prompt (n = p g).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError, EasyDeLError
from ed_infra.inputs import SAMPLING_MASKS
from ed_infra.outputs import CausalLMOutput, Metric
from ed_models.protocol import LanguageModel

from ed_trainers.arguments import METHODS
from ed_trainers.batches import HostBatch
from ed_trainers.contract import A, Batch, Loss, Models, Prepared
from ed_trainers.losses.policy import (
    BONUS_ENTROPY,
    Policy,
    Truncation,
    clip_metrics,
    count_scored_rows,
    gamma_weights,
    old_logps,
    row_metrics,
    select_near_completions,
    select_uncertain_tokens,
)
from ed_trainers.methods.reference import Reference
from ed_trainers.online.completions import Completions, SampledPrompts
from ed_trainers.online.phase import (
    HELD_OUT,
    OnlineRun,
    PhaseRows,
    Question,
    ReadPrompts,
    compute_policy,
    online_method,
)
from ed_trainers.online.scorer import Scorer, Scores
from ed_trainers.options.groups import GroupArguments, GRPOArguments
from ed_trainers.options.online import OnlineArguments
from ed_trainers.rollout import AheadRollout, Weights
from ed_trainers.trainer import Trainer

if TYPE_CHECKING:
    from ed_trainers.online.entropy_control import EntropyControl

#: Number of consecutive steps with equal rewards in every group after which a warning is printed.
EQUAL_STEPS = 10
#: Figures in the terminal and the summary.
GROUP_COLUMNS = ("reward", "kl", "completions/mean_length", "loss")
#: Name of the term of `entropy_coef` in the loss.
ENTROPY = "entropy_loss"
# Names of arrays of rows.
_ENTROPY_WEIGHTS, _ENGINE_LOGPS = "entropy_weights", "engine_logps"
# TRL's constant: keeps advantages finite if all rewards of a group are equal.
_SMALL = 1e-4


class GroupRun(OnlineRun[A]):
    """A run of a method that compares the rewards of a group of completions."""

    scorer: Scorer
    reference: Reference
    equal_rewards: EqualRewards
    entropy_control: EntropyControl | None = None

    def create_parts(self, models: dict[str, LanguageModel]) -> None:
        """See `MethodRun`."""
        self.scorer = Scorer(self, models)
        self.reference = Reference(self, models)
        super().create_parts(models)
        self.equal_rewards = EqualRewards(self.phase.options.updates_per_generation)
        options = self.arguments
        if isinstance(options, GRPOArguments) and options.use_adaptive_entropy:
            from ed_trainers.online.entropy_control import EntropyControl

            self.entropy_control = EntropyControl(options)

    def select_prompts(self, read: ReadPrompts, weights: Weights, number: int) -> SampledPrompts:
        """See `OnlineRun`; the groups of the trained prompts have different rewards."""
        from ed_trainers.online.dynamic_sampling import sample_groups

        options, phase = self.arguments, self.phase
        assert isinstance(options, GroupArguments), "the options of a method that compares groups"
        return sample_groups(
            options,
            self.scorer,
            lambda later: phase.sample(read(later), weights, number=number, later=later),
            weights,
        )

    def prepare(self, batch: HostBatch) -> Prepared:
        """See `MethodRun`; with a control of the entropy, the rows have its weight."""
        prepared = super().prepare(batch)
        if self.entropy_control is None:
            return prepared
        count = len(next(iter(prepared.values())))
        weights = np.full(count, self.entropy_control.weight, np.float32)
        return prepared.replace(**{_ENTROPY_WEIGHTS: weights})

    def observe(self, report: Mapping[str, jax.Array]) -> None:
        """See `MethodRun`."""
        if self.entropy_control is not None:
            self.entropy_control.observe(report)

    @property
    def figures(self) -> Mapping[str, float]:
        """See `MethodRun`."""
        if self.entropy_control is None:
            return super().figures
        return {**super().figures, "entropy_coef": self.entropy_control.coefficient}

    def state_dict(self) -> dict[str, object]:
        """See `MethodRun`."""
        return {} if self.entropy_control is None else self.entropy_control.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """See `MethodRun`."""
        if self.entropy_control is not None and state:
            self.entropy_control.load_state_dict(state)


# --- a generation ---


def rows(
    run: GroupRun[GRPOArguments],
    completions: Completions,
    weights: Weights,
    number: int,
    scores: Scores | None = None,
) -> PhaseRows:
    """Return the rows of `group_rows`, with `correction` [n, s] for the engine's sampling."""
    if not run.arguments.routing_replay:
        completions = replace(completions, experts=[])
    elif not completions.experts:
        raise ConfigError(
            "routing_replay needs the experts of each token, and the rollout returned none: use "
            "the engine with a model that has experts, or omit routing_replay"
        )
    if run.arguments.sampling_mask_replay and not completions.masks:
        raise ConfigError(
            "sampling_mask_replay needs the tokens from which each token was sampled, and the "
            "rollout returned none: use the engine, or omit sampling_mask_replay"
        )
    asks = run.arguments.keeps_old or run.arguments.has_reference
    row_arrays, figures = group_rows(
        run,
        completions,
        weights,
        number,
        asks=asks,
        ask=policies,
        advantages=_advantages,
        scores=scores,
    )
    if not run.arguments.corrects:
        return row_arrays, figures
    sampled = completions.at_tokens(completions.logprobs, row_arrays["weights"].shape[1])
    trainer_logps = row_arrays.pop("sampled_logps", row_arrays["old_logps"])
    row_arrays["correction"], more = correction(
        run.arguments, trainer_logps, sampled, row_arrays["weights"]
    )
    require_equal_bits(run, more)
    if run.arguments.off_policy_mask_threshold is not None:
        # Without the filters of the sampling, which the loss does not apply.
        row_arrays[_ENGINE_LOGPS] = sampled - trainer_logps + row_arrays["old_logps"]
    return row_arrays, {**figures, **more}


def policies(run: GroupRun[GRPOArguments], models: Models, batch: Batch) -> dict[str, jax.Array]:
    """Return `old_logps` and `reference_logps` [n, s] of rows, as far as the loss reads them.

    If samples are corrected and the sampling has filters, the forward pass also returns
    `sampled_logps`.
    """
    out = {}
    if run.arguments.keeps_old:
        # With masks, the log-probabilities are those of the sampling already.
        truncated = run.arguments.corrects and not run.arguments.sampling_mask_replay
        _, learner_policy = compute_policy(run, models.learner, batch, truncated=truncated)
        out["old_logps"] = learner_policy.logps
        if learner_policy.sampled_logps is not None:
            out["sampled_logps"] = learner_policy.sampled_logps
    if run.arguments.has_reference:
        out["reference_logps"] = compute_policy(run, models["reference"], batch)[1].logps
    return out


def _advantages(
    run: GroupRun[GRPOArguments], groups: np.ndarray, row_arrays: dict[str, np.ndarray]
) -> np.ndarray:
    """Return the rewards [p, g] minus the mean of their group, scaled by `scale_rewards`."""
    del row_arrays
    group_advantages = groups - nanmean(groups)
    if run.arguments.scale_rewards == "group":
        group_advantages = group_advantages / (nanstd(groups) + _SMALL)
    elif run.arguments.scale_rewards == "batch":
        group_advantages = group_advantages / (nanstd(groups.reshape(-1)) + _SMALL)
    return group_advantages


def group_rows(
    run: GroupRun,
    completions: Completions,
    weights: Weights,
    number: int,
    *,
    asks: bool,
    ask: Question,
    advantages: Callable[[GroupRun, np.ndarray, dict[str, np.ndarray]], np.ndarray],
    scores: Scores | None = None,
) -> PhaseRows:
    """Return one row per completion, with the arrays of `ask`, and figures for the log.

    `advantages` [n] and `scored` [n] are 0 for a completion without a reward, `present` [n] is 1,
    and `tokens` [n] is the mean number of counted tokens of the completions with a reward.

    Args:
        run: the run of the method.
        completions: the completions of groups, ordered by prompt.
        weights: the weights that sampled them.
        number: number of the generation.
        asks: whether the loss or the advantages read arrays of `ask`.
        ask: returns arrays [n, s] from the models.
        advantages: returns the advantages from the rewards, both [p, g], NaN without a reward.
        scores: the rewards, if they are already known.
    """
    options = run.arguments
    assert isinstance(options, GroupArguments), "the options of a method that compares groups"
    assert isinstance(options, OnlineArguments), "the method samples"
    row_arrays = dict(completions.rows(options.row_length))
    if isinstance(options, GRPOArguments) and options.sampling_mask_replay:
        size = run.learner.config.get_text_config().vocab_size
        row_arrays[SAMPLING_MASKS] = completions.token_masks(options.row_length, size)
    if options.mask_truncated_completions:
        row_arrays["weights"] *= np.asarray(completions.ended, np.float32)[:, None]
    if asks:
        row_arrays |= run.phase.ask(ask, row_arrays, weights)
    if scores is None:
        scores = run.scorer.score(completions, row_arrays, weights)
    reward_mask = np.isfinite(scores.total)
    count = len(completions)
    groups = scores.total.reshape(-1, scores.per_prompt or options.num_return_sequences)
    flat_advantages = advantages(run, groups, row_arrays).reshape(-1)
    figures = scores.figures()
    figures["frac_reward_zero_std"] = float(np.mean(nanstd(groups) < 1e-8))
    counted_tokens = row_arrays["weights"][reward_mask].sum()
    row_arrays |= {
        "advantages": np.where(reward_mask, np.nan_to_num(flat_advantages), 0).astype(np.float32),
        "rewards": np.where(reward_mask, scores.total, 0).astype(np.float32),
        "scored": reward_mask.astype(np.float32),
        "present": np.ones(count, np.float32),
        "tokens": np.full(count, counted_tokens / max(reward_mask.sum(), 1), np.float32),
    }
    if number != HELD_OUT:
        run.equal_rewards.check(row_arrays["rewards"], figures["frac_reward_zero_std"] == 1)
    return row_arrays, figures


class EqualRewards:
    """Prints a warning if the rewards of every group are equal for many steps.

    Args:
        updates: number of optimizer steps of a generation.
    """

    def __init__(self, updates: int):
        self._updates, self._steps = updates, 0

    def check(self, rewards: np.ndarray, equal: bool) -> None:
        """Count the steps of a generation.

        Args:
            rewards: rewards of the generation, [n].
            equal: whether the rewards of each group are equal.
        """
        previous_steps, self._steps = self._steps, self._steps + self._updates if equal else 0
        if previous_steps < EQUAL_STEPS <= self._steps and jax.process_index() == 0:
            print(_equal_rewards(rewards, self._steps), flush=True)


def _equal_rewards(rewards: np.ndarray, steps: int) -> str:
    """Return the warning about groups whose completions all have the same reward."""
    seen = ", ".join(f"{value:g}" for value in np.unique(rewards)[:3])
    return (
        f"warning: for {steps} steps in a row, all completions of each prompt had equal rewards "
        f"(the last ones: {seen}). The advantages are 0, so the model does not learn from them. "
        "Check that the reward functions read the completions in the shape they get (with chat "
        "prompts a completion is a list of messages), that the task is neither too hard nor "
        "solved, that max_completion_length is long enough, and that temperature is high enough "
        "for different completions"
    )


# --- the loss ---


def loss(run: GroupRun[GRPOArguments], models: Models, batch: Batch, key: jax.Array | None) -> Loss:
    """Return the loss summed over tokens or completions; see `GRPOArguments.loss_type`."""
    return policy_loss(run.arguments, batch, *compute_learner_policy(run, models, batch, key))


def compute_learner_policy(
    run: GroupRun[GRPOArguments], models: Models, batch: Batch, key: jax.Array | None
) -> tuple[CausalLMOutput, Policy]:
    """Return the learner's output and figures of its tokens, with the gradients of the loss."""
    has_bonus = run.arguments.has_entropy_bonus
    return compute_policy(run, models.learner, batch, key, entropy_gradient=has_bonus)


def policy_loss(
    arguments: GRPOArguments, batch: Batch, output: CausalLMOutput, policy: Policy
) -> Loss:
    """Return the loss of rows from the learner's output and figures of their tokens.

    A row without a reward counts nowhere: neither in the losses nor in their divisors.
    """
    batch = count_scored_rows(batch)
    weights = batch["weights"]
    tokens = jnp.sum(weights, axis=-1)
    advantages = batch["advantages"][:, None]
    lower, upper = 1 - arguments.epsilon, 1 + arguments.upper

    log_ratios = (policy.logps - old_logps(batch, policy)) * weights
    if arguments.by_sequence:
        log_ratios = jnp.sum(log_ratios, axis=-1, keepdims=True)
        log_ratios = log_ratios / jnp.maximum(tokens[:, None], 1)
    ratios = jnp.exp(log_ratios)
    metrics = row_metrics(batch, policy)
    kl = None
    if arguments.has_reference:
        reference_log_ratios = (batch["reference_logps"] - policy.logps) * weights
        kl = jnp.exp(reference_log_ratios) - reference_log_ratios - 1
        kl = kl * ratios if arguments.use_bias_correction_kl else kl
        metrics["kl"] = Metric.of(jnp.sum(kl * weights), jnp.sum(tokens))

    spread, counted = jnp.broadcast_arrays(ratios, weights)
    if arguments.by_sequence:
        counted = jnp.where(jnp.arange(weights.shape[-1]) == 0, batch["present"][:, None], 0)
    factors = batch.get("correction", 1.0)
    match arguments.loss_type:
        case "cispo":
            fixed = jax.lax.stop_gradient(jnp.minimum(ratios, arguments.upper))
            losses = -fixed * advantages * policy.logps
            clipped = ((spread > arguments.upper) & (advantages > 0)).astype(jnp.float32)
            share = Metric.of(jnp.sum(clipped * counted), jnp.sum(counted))
            metrics["cispo_clip_ratio"] = share
        case "sapo":
            slopes = jnp.where(
                advantages > 0, arguments.sapo_temperature_pos, arguments.sapo_temperature_neg
            )
            losses = -jax.nn.sigmoid(slopes * (ratios - 1)) * 4 / slopes * advantages
        case "vespo":
            token_log_ratios = policy.logps - old_logps(batch, policy)
            phi = gamma_weights(
                token_log_ratios,
                batch.get("correction", jnp.ones_like(weights)),
                advantages,
                weights,
                positive=(arguments.vespo_k_pos, arguments.vespo_lambda_pos),
                negative=(arguments.vespo_k_neg, arguments.vespo_lambda_neg),
            )
            losses, factors = -phi * advantages * policy.logps, 1.0
            present = batch["present"]
            mean = Metric.of(jnp.sum(phi[:, 0] * present), jnp.sum(present))
            metrics["vespo/phi_seq_mean"] = mean
        case _:
            bounded = ratios if arguments.delta is None else jnp.minimum(ratios, arguments.delta)
            clipped = jnp.clip(ratios, lower, upper)
            losses = -jnp.minimum(bounded * advantages, clipped * advantages)
            spread = jnp.broadcast_to(bounded, weights.shape)
            metrics |= clip_metrics(spread, advantages, counted, lower, upper)
    if arguments.off_policy_mask_threshold is not None:
        sampled_logps = batch.get(_ENGINE_LOGPS, old_logps(batch, policy))
        threshold = arguments.off_policy_mask_threshold
        drift = (sampled_logps - policy.logps) * weights
        losses = losses * select_near_completions(drift, advantages, tokens, threshold)
    uncertain = weights
    if arguments.top_entropy_quantile < 1:
        share = arguments.top_entropy_quantile
        uncertain = select_uncertain_tokens(policy.entropy, weights, share)
        losses = losses * uncertain
    losses = losses * factors
    if kl is not None:
        losses = losses + arguments.beta * kl
    sums = jnp.sum(losses * weights, axis=-1)
    count = jnp.sum(uncertain)
    if arguments.use_adaptive_entropy:
        metrics[BONUS_ENTROPY] = Metric.of(jnp.sum(policy.entropy * uncertain), count)
    total_loss = Loss.of(output, *_reduce_loss(arguments, sums, tokens, batch), **metrics)
    coefficient = arguments.entropy_coef
    if arguments.use_adaptive_entropy:
        coefficient = batch[_ENTROPY_WEIGHTS][:, None] if _ENTROPY_WEIGHTS in batch else 0
    if not isinstance(coefficient, float | int) or coefficient != 0:
        # The mean over the tokens, whatever the loss divides by.
        bonus = jnp.sum(coefficient * policy.entropy * uncertain)
        total_loss.sums[ENTROPY] = Metric.of(-bonus, count)
    return total_loss


def _reduce_loss(
    arguments: GRPOArguments, sums: jax.Array, tokens: jax.Array, batch: Batch
) -> tuple[jax.Array, jax.Array]:
    """Return the loss and its weight from the sum of each completion's losses and its tokens."""
    present = jnp.sum(batch["present"])
    match arguments.loss_type:
        case "grpo" | "gspo" | "sapo":
            return jnp.sum(sums / jnp.maximum(tokens, 1)), present
        case "dr_grpo":
            return jnp.sum(sums) / arguments.max_completion_length, present
        case "luspo":
            return jnp.sum(sums), present
        case "bnpo":
            return jnp.sum(sums), jnp.sum(tokens)
        case "dapo" | "cispo" | "vespo":
            return jnp.sum(sums), jnp.sum(batch["tokens"] * batch["present"])
    raise AssertionError(arguments.loss_type)


def correction(
    arguments: GRPOArguments, trainer_logps: np.ndarray, sampled: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, dict[str, float]]:
    """Return the factor of each token's loss, float32 [n, s], and figures for the log.

    Args:
        arguments: options that select the correction.
        trainer_logps: log-probabilities of the trainer, [n, s].
        sampled: log-probabilities of the engine. Both belong to the distribution of the sampling,
            with temperature and filters.
        weights: 1 for the tokens of completions.
    """
    token_mask = weights > 0
    log_ratios = np.where(token_mask, trainer_logps - sampled, 0)
    kind, cap = arguments.importance_sampling_correction, arguments.importance_sampling_cap
    by_sequence = kind.startswith("sequence")
    if by_sequence:
        log_ratios = np.broadcast_to(log_ratios.sum(-1, keepdims=True), log_ratios.shape)
    ratios = np.exp(np.minimum(log_ratios, 80.0))
    if kind.endswith("truncate"):
        factors = np.minimum(ratios, cap)
    else:
        factors = np.where(ratios > cap, 0, ratios)
    distance = np.abs(trainer_logps - sampled)[token_mask]
    seen = factors[:, 0] if by_sequence else factors[token_mask]
    above = ratios[:, 0] if by_sequence else ratios[token_mask]
    figures = {}
    if distance.size:
        figures = {
            "sampling/sampling_logp_difference/mean": float(distance.mean()),
            "sampling/sampling_logp_difference/max": float(distance.max()),
            "sampling/importance_sampling_ratio/min": float(seen.min()),
            "sampling/importance_sampling_ratio/mean": float(seen.mean()),
            "sampling/importance_sampling_ratio/max": float(seen.max()),
            "sampling/importance_sampling_ratio/above_cap": float((above > cap).mean()),
        }
    return np.where(token_mask, factors, 1).astype(np.float32), figures


def require_equal_bits(run: GroupRun[GRPOArguments], figures: dict[str, float]) -> None:
    """Raise EasyDeLError if the engine and a learner with `batch_invariant` differ in a bit.

    Filters of the sampling are computed in another order, so their rounding is allowed. A rollout
    that samples ahead uses earlier weights, so its log-probabilities differ.
    """
    if isinstance(run.rollout, AheadRollout) and run.rollout.max_staleness:
        return
    options, worst = run.arguments, figures.get("sampling/sampling_logp_difference/max", 0.0)
    filtered = Truncation(options.top_k, options.top_p, options.min_p).active
    if run.learner.config.batch_invariant and not filtered and worst > 0:
        raise EasyDeLError(
            f"the engine's log-probabilities differ by {worst:.1e} from the trainer's, although "
            "batch_invariant is true: the ratios of the first update are not 1. Rollout and "
            "trainer must run on CPUs with the same native kernels and the same XLA_FLAGS; or set "
            "batch_invariant to false"
        )


def nanmean(values: np.ndarray) -> np.ndarray:
    """Return the mean of the finite values along the last axis, which is kept; NaN without any."""
    finite_mask = np.isfinite(values)
    count = finite_mask.sum(-1, keepdims=True)
    total = np.where(finite_mask, values, 0).sum(-1, keepdims=True, dtype=np.float64)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def nanstd(values: np.ndarray) -> np.ndarray:
    """Return the standard deviation of a sample along the last axis, like `nanmean`."""
    finite_mask = np.isfinite(values)
    count = finite_mask.sum(-1, keepdims=True)
    squares = np.where(finite_mask, values - nanmean(values), 0) ** 2
    variance = squares.sum(-1, keepdims=True) / np.maximum(count - 1, 1)
    return np.where(count > 1, np.sqrt(variance), np.nan)


#: Arrays of rows with one value per token.
TOKEN_ARRAYS = ("old_logps", "reference_logps", "correction", _ENGINE_LOGPS)
GRPO = online_method(
    run=GroupRun[GRPOArguments],
    rows=rows,
    loss=loss,
    token_arrays=TOKEN_ARRAYS,
    progress_columns=GROUP_COLUMNS,
)


class GRPOTrainer(Trainer):
    """Trains a model on groups of completions and their rewards; `arguments`: `GRPOArguments`."""

    entry = METHODS["grpo"]
    record = GRPO


class GSPOTrainer(Trainer):
    """Trains a model with one ratio for each completion; `arguments` are `GSPOArguments`."""

    entry = METHODS["gspo"]
    record = GRPO


class RLVRTrainer(Trainer):
    """Trains a model on rewards that rules verify; `arguments` are `RLVRArguments`."""

    entry = METHODS["rlvr"]
    record = GRPO
