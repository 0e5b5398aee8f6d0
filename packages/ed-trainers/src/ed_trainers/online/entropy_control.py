"""`EntropyControl`: a weight of the entropy in the loss that follows the entropy of the steps.

He et al., arXiv:2505.22312, with the rule of TRL's trainer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax

from ed_trainers.losses.policy import BONUS_ENTROPY
from ed_trainers.options.groups import GRPOArguments


class EntropyControl:
    """The weight of the entropy in the next step; see `GRPOArguments.use_adaptive_entropy`.

    The report of a step stays on the devices until the next step asks for the weight.

    Args:
        options: the bounds and the target.
    """

    def __init__(self, options: GRPOArguments):
        self._options, self._report = options, None
        self._coefficient, self._entropy = options.entropy_coef, math.inf

    def observe(self, report: Mapping[str, jax.Array]) -> None:
        """Receive the figures of a step."""
        self._read_report()
        self._report = report[BONUS_ENTROPY]

    @property
    def coefficient(self) -> float:
        """The weight, whether or not it counts."""
        self._read_report()
        return self._coefficient

    @property
    def weight(self) -> float:
        """The weight in the next step; 0 above the target."""
        self._read_report()
        return self._coefficient if self._entropy <= self._options.entropy_target else 0.0

    def _read_report(self) -> None:
        """Change the weight by the newest report, once."""
        if self._report is None:
            return
        options, self._entropy, self._report = self._options, float(self._report), None
        if self._entropy <= options.entropy_target:
            raised = self._coefficient + options.entropy_coef_delta
            self._coefficient = min(raised, options.entropy_coef_max)
        else:
            lowered = self._coefficient - options.entropy_coef_delta
            self._coefficient = max(lowered, options.entropy_coef_min)

    def state_dict(self) -> dict[str, object]:
        """Return the values of a checkpoint."""
        return {"coefficient": self.coefficient, "entropy": self._entropy}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue with the values of a checkpoint."""
        self._coefficient, self._entropy = (
            float(str(state[name])) for name in ("coefficient", "entropy")
        )
        self._report = None
