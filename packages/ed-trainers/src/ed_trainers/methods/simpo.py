"""Simple preference optimization: log-probabilities per token, and a target margin.

Meng et al., arXiv:2405.14734; what `cpo` does with `loss_type: simpo` and `cpo_alpha: 0`.
"""

from __future__ import annotations

from typing import ClassVar

from ed_trainers.base_arguments import TrainingArguments
from ed_trainers.methods.cpo import CPOTrainer
from ed_trainers.options.preference import SimPOArguments


class SimPOTrainer(CPOTrainer):
    """Learns to prefer the chosen answer of each pair by a margin; `arguments`: SimPOArguments."""

    arguments_class: ClassVar[type[TrainingArguments]] = SimPOArguments
    loss_type = "simpo"
    cross_entropy_weight = 0.0
