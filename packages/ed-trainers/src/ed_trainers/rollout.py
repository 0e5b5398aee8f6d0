"""How a method asks for completions without knowing who generates them, and with which weights.

Methods that learn from their own samples take any object that is a `Rollout`. The engine package
satisfies the protocol from above, so that trainers and engine stay independent of each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ed_infra.errors import EasyDeLError
from ed_models.protocol import LanguageModel
from flax import nnx


class Weights:
    """The learner's weights between two optimizer steps, lent to whoever reads them.

    A step overwrites the arrays. So the weights end when the next step begins: a reader takes what
    it needs while it is called, and keeps neither the arrays nor what shares memory with them.

    Args:
        graphdef: structure of the model.
        graphstate: the parameters that learn.
        graphother: the model's other variables.
        version: updates that made these weights.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        graphstate: nnx.State,
        graphother: nnx.State,
        *,
        version: int,
    ):
        self.graphdef = graphdef
        self.version = version
        self._states: tuple[nnx.State, nnx.State] | None = (graphstate, graphother)

    @property
    def state(self) -> nnx.State:
        """All variables of the model, as `nnx.state(model)` gives them.

        Raises:
            EasyDeLError: the next step has begun.
        """
        if self._states is None:
            raise EasyDeLError(
                f"the weights of step {self.version} are overwritten: read them before the call "
                "that was given them returns, or ask the trainer for its present weights()"
            )
        return nnx.merge_state(*self._states)

    @property
    def model(self) -> LanguageModel:
        """A module that shares the arrays.

        Raises:
            EasyDeLError: the next step has begun.
        """
        return nnx.merge(self.graphdef, self.state)

    def end(self) -> None:
        """Let go of the arrays: they are about to be overwritten."""
        self._states = None


@dataclass(frozen=True)
class Sampled:
    """One sampled continuation.

    Attributes:
        token_ids: the sampled tokens, the end token included where one was sampled.
        logprobs: log-probability of each token in the distribution that it was drawn from, with
            temperature, filters and all other settings of the sampling.
        weights_version: the `version` of those weights.
        ended: whether it came to an end of its own; False where the longest length cut it.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    weights_version: int
    ended: bool = True


@runtime_checkable
class Rollout(Protocol):
    """Something that completes prompts."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Mapping[str, Any],
        weights: Weights,
        *,
        seeds: Sequence[int] | None = None,
    ) -> list[Sampled]:
        """Complete each prompt.

        Args:
            prompts: token ids.
            params: settings of the sampling: `max_tokens`, `temperature`, `top_p`, `top_k`,
                `min_p`, and whatever else the one who samples knows.
            weights: what to sample with; readable until this call returns.
            seeds: of each prompt: equal seeds, prompts, settings and weights give equal tokens.

        Returns:
            As many continuations as prompts, in their order.
        """
        ...
