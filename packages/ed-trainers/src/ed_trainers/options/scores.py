"""Options of the methods that train a model to score answers or steps. Free of jax."""

from __future__ import annotations

from typing import Literal

from ed_infra.options import NotNegative

from ed_trainers.options.noise import NoiseArguments


class RewardArguments(NoiseArguments):
    """A reward model of pairs (Bradley and Terry): chosen answers receive higher scores.

    The field `margin` of a row may contain the minimum difference of the scores.
    """

    DEFAULT_LENGTH = 1024
    trainer_type: Literal["reward"] = "reward"
    center_rewards_coefficient: NotNegative | None = 0.1
    """Weight of the squared sum of both scores, which keeps their mean near 0; null: none."""


class PRMArguments(NoiseArguments):
    """A process reward model (Lightman et al., arXiv:2305.20050): classifies steps as correct or
    not."""

    trainer_type: Literal["prm"] = "prm"
