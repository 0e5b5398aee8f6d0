"""Options of `ppo`. Free of jax. Names and defaults are TRL's."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from ed_infra.options import Count, Fraction, NotNegative, Positive, choice

from ed_trainers.options.base import Flag
from ed_trainers.options.online import OnlineArguments, RewardedArguments
from ed_trainers.options.preference import AnswerArguments
from ed_trainers.options.sync import SyncArguments

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
    """Times that the completions of a generation are learned from."""
    beta: NotNegative = 0.05
    """Factor on the divergence from the reference, which is taken off the reward of each token; 0
    reads no reference."""
    kl_estimator: Annotated[str, choice("kl_estimator", KL_ESTIMATORS)] = "k1"
    """How the divergence of a token is estimated (Schulman, joschu.net/blog/kl-approx.html):
    `k1` is the log-ratio, `k2` half its square, `k3` has no negative values and no bias."""
    cliprange: Positive = 0.2
    """How far the ratio of probabilities may go from 1 before a token stops pushing it."""
    vf_coef: NotNegative = 0.1
    """Factor on the loss of the values."""
    cliprange_value: Positive = 0.2
    """How far a value may go from what it was when the completions were sampled."""
    gamma: Fraction = 1.0
    """Discount of a token."""
    lam: Fraction = 0.95
    """Of the generalized advantages (arXiv:1506.02438): 1 takes whole returns, 0 single steps."""
    whiten_rewards: Flag = False
    """Scale the rewards of a generation's tokens to unit variance; advantages always are."""
    value_head: str | None = None
    """Directory of a model that `ppo` saved, whose value head training begins with; None begins at
    values of 0."""
    missing_eos_penalty: NotNegative | None = None
    """Taken off the score of a completion that the longest length cut."""

    def idle(self) -> list[tuple[str, str]]:
        """See `TrainingArguments.idle`."""
        if self.has_reference or "kl_estimator" not in self.model_fields_set:
            return super().idle()
        return [*super().idle(), ("kl_estimator", "beta is 0: nothing is taken off")]
