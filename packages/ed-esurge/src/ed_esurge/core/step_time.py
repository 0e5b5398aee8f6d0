"""How many decode steps one program computes.

Every process of an engine must plan the same steps. The number therefore depends on an estimate of
the time of a step and never on a measured time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

#: Target for the duration of a program, in seconds. A new request waits for the running programs.
PROGRAM_SECONDS = 6.5e-3
#: Largest automatic number of steps of a program.
MOST_STEPS = 8


class Speed(NamedTuple):
    """Approximate speed of a platform for a decode step.

    Attributes:
        layer: seconds of a layer without arithmetic.
        bytes: bytes read in a second.
        operations: floating-point operations in a second.
    """

    layer: float
    bytes: float
    operations: float


SPEEDS = {"cpu": Speed(2e-5, 5e10, 1e11)}
#: Speed of platforms without an entry.
_ACCELERATOR = Speed(1.5e-4, 1e12, 1e14)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Estimated time of a decode step.

    Attributes:
        most: maximum number of steps of a program; 1 = each step has a program.
        step: seconds of a step without sequences.
        row: seconds per sequence.
        token: seconds per cached token of a sequence.
    """

    most: int = 1
    step: float = 0.0
    row: float = 0.0
    token: float = 0.0

    @classmethod
    def estimate(
        cls, platform: str, *, layers: int, weights: int, numbers: int, token_bytes: float
    ) -> StepTime:
        """Return the estimate for a model.

        Args:
            platform: platform of the devices.
            layers: number of layers.
            weights: bytes of the weights.
            numbers: number of weights.
            token_bytes: bytes of the keys and values of a token.
        """
        speed = SPEEDS.get(platform, _ACCELERATOR)
        step = layers * speed.layer + weights / speed.bytes
        row, token = 2 * numbers / speed.operations, token_bytes / speed.bytes
        return cls(
            MOST_STEPS if cls(MOST_STEPS, step, row).steps(1, 0) > 1 else 1, step, row, token
        )

    def steps(self, rows: int, tokens: int) -> int:
        """Return the number of decode steps of a program.

        Args:
            rows: number of sequences.
            tokens: number of cached tokens of all sequences.
        """
        seconds = self.step + rows * self.row + tokens * self.token
        if seconds * self.most <= PROGRAM_SECONDS:
            return self.most
        return max(1, min(self.most, round(PROGRAM_SECONDS / seconds)))


#: Each step has a program.
ONE_STEP = StepTime()
