"""Options of `ppo`. Free of jax. Names and defaults are TRL's."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from ed_infra.options import Count, Fraction, NotNegative, Positive, choice

from ed_trainers.options.base import StrictFlag
from ed_trainers.options.online import OnlineArguments, RewardedArguments
from ed_trainers.options.preference import AnswerArguments, SyncArguments

KL_ESTIMATORS = ("k1", "k2", "k3")


class PPOArguments(AnswerArguments, RewardedArguments, OnlineArguments, SyncArguments):
    """Proximal policy optimization (Schulman et al., arXiv:1707.06347) with a value head."""

    ALIASES: ClassVar[dict[str, str]] = {
        **OnlineArguments.ALIASES,
        **RewardedArguments.ALIASES,
        "num_ppo_epochs": "num_iterations",
        "num_mini_batches": "steps_per_generation",
        "response_length": "max_completion_length",
    }

    trainer_type: Literal["ppo"] = "ppo"
    num_iterations: Count = 4
    """Number of times that the completions of a generation are used for training."""
    beta: NotNegative = 0.05
    """Weight of the divergence from the reference, which is subtracted from the reward of each
    token; 0: no reference."""
    kl_estimator: Annotated[str, choice("kl_estimator", KL_ESTIMATORS)] = "k1"
    """Estimator of the divergence of a token (Schulman, joschu.net/blog/kl-approx.html): `k1` is
    the log-ratio, `k2` half its square; `k3` is unbiased and never negative."""
    cliprange: Positive = 0.2
    """Clipping range of the probability ratio around 1."""
    vf_coef: NotNegative = 0.1
    """Weight of the loss of the values."""
    cliprange_value: Positive = 0.2
    """Clipping range of a value around its value at the time of sampling."""
    gamma: Fraction = 1.0
    """Discount factor per token."""
    lam: Fraction = 0.95
    """Lambda of generalized advantage estimation (arXiv:1506.02438): 1 uses whole returns, 0 single
    steps."""
    whiten_rewards: StrictFlag = False
    """Scale the token rewards of a generation to unit variance. Advantages are always scaled."""
    value_head: str | None = None
    """Directory of a model that `ppo` saved, for the initial value head. None: initial values of
    0."""
    missing_eos_penalty: NotNegative | None = None
    """Subtracted from the score of a completion that reached the maximum length."""

    def idle(self) -> list[tuple[str, str]]:
        """See `TrainingArguments.idle`."""
        if self.has_reference or "kl_estimator" not in self.model_fields_set:
            return super().idle()
        return [*super().idle(), ("kl_estimator", "beta is 0: nothing is taken off")]
