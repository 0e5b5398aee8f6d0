"""Simple preference optimization: log-probabilities per token, and a target margin.

Meng et al., arXiv:2405.14734; what `cpo` does with `loss_type: simpo` and `cpo_alpha: 0`.
"""

from __future__ import annotations

from typing import ClassVar

from ed_trainers.methods.cpo import CPOTrainer
from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.preference import SimPOArguments


class SimPOTrainer(CPOTrainer):
    """Learns to prefer the chosen answer of each pair by a margin; `arguments`: SimPOArguments."""

    arguments_class: ClassVar[type[TrainingArguments]] = SimPOArguments

    @property
    def loss_type(self) -> str:
        """`simpo`."""
        return "simpo"

    @property
    def cross_entropy_weight(self) -> float:
        """There is no cross-entropy."""
        return 0.0
