"""Reinforcement learning with verifiable rewards: `grpo` whose rewards are checked by rules.

Lambert et al., arXiv:2411.15124. The rules are in `ed_trainers.rewards.rules`.
"""

from __future__ import annotations

from typing import ClassVar

from ed_trainers.methods.grpo import GRPOTrainer
from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.groups import RLVRArguments


class RLVRTrainer(GRPOTrainer):
    """Learns from rewards that rules check; `arguments` are `RLVRArguments`."""

    arguments_class: ClassVar[type[TrainingArguments]] = RLVRArguments
