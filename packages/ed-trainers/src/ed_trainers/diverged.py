"""When a run ends because it diverged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ed_infra.errors import EasyDeLError


class TrainingDiverged(EasyDeLError):
    """The loss or the gradient is not finite."""


class Divergence:
    """Looks at the figures of each step.

    Args:
        longest: bad steps in a row that are skipped before the run ends, where steps are skipped.
    """

    def __init__(self, longest: int):
        self._longest = longest
        self._skipped = 0

    def check(
        self, step: int, figures: Mapping[str, float], kept: Callable[[], Sequence[int]]
    ) -> None:
        """Look at a step.

        Args:
            figures: `loss`, `grad_norm`, and `skipped` where bad steps are skipped.
            kept: gives the steps of the checkpoints, rising, for the message.

        Raises:
            TrainingDiverged: a figure is not finite, and the step was not skipped; or too many were
                skipped in a row.
        """
        skipped = bool(figures.get("skipped"))
        self._skipped = self._skipped + 1 if skipped else 0
        if skipped and self._skipped < self._longest:
            return
        if not skipped and math.isfinite(figures["loss"]) and math.isfinite(figures["grad_norm"]):
            return
        many = f", {self._longest} steps in a row were skipped" if skipped else ""
        steps = kept()
        where = "there is no checkpoint"
        if steps:
            where = f"the checkpoint of step {steps[-1]} is intact"
        raise TrainingDiverged(
            f"step {step}: loss {figures['loss']}, gradient norm {figures['grad_norm']}{many}; "
            f"{where}. Lower learning_rate, add warmup_steps, or set clip_grad"
        )
