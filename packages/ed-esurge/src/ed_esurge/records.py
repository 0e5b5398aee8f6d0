"""What an engine records of each token, for training that repeats the sampling. Imports no jax."""

from __future__ import annotations

from typing import NamedTuple


class Records(NamedTuple):
    """Records of the outputs.

    Attributes:
        experts: the experts that the routers chose for each token.
        masks: the tokens of the vocabulary from which each token was sampled.
    """

    experts: bool = False
    masks: bool = False


NOTHING = Records()
