"""How a trainer asks for completions without knowing who generates them.

Methods that learn from their own samples take any object that is a `Rollout`. The engine package
satisfies it from above, so that trainers and engine stay independent of each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class Completion:
    """One sampled continuation.

    Attributes:
        token_ids: the sampled tokens, the end token included where one was sampled.
        logprobs: log-probability of each token under the weights that sampled it.
        weights_version: which `update_weights` those weights came from.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    weights_version: int


@runtime_checkable
class Rollout(Protocol):
    """Something that completes prompts with the weights it was last given."""

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Mapping[str, Any]
    ) -> list[Completion]:
        """Complete each prompt (token ids); as many completions as prompts, in their order."""
        ...

    def update_weights(self, model: Any, version: int) -> None:
        """Take the model's present weights; later completions carry `version`."""
        ...
