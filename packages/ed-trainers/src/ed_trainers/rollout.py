"""`Rollout`: completions of prompts for the methods that sample, and the weights that are lent.

A method that samples accepts any object with this protocol. `ed-elarge` implements the protocol
with the engine, so trainers and engine do not import each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from ed_infra.errors import EasyDeLError
from ed_models.protocol import LanguageModel
from flax import nnx


class Weights:
    """The learner's weights between two optimizer steps, lent for one call.

    A step overwrites the arrays, so the weights are invalid when the next step begins. A reader
    must not keep the arrays, or arrays that share their memory, after its call.

    Args:
        graphdef: structure of the model.
        graphstate: the trained parameters.
        graphother: the other variables of the model.
        version: number of updates that produced these weights.
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
        """All variables of the model, as `nnx.state(model)` returns them.

        Raises:
            EasyDeLError: the next step has begun.
        """
        if self._states is None:
            raise EasyDeLError(
                f"the weights of step {self.version} are overwritten: read them within the call "
                "that receives them, or call weights() of the trainer for the present weights"
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
        """Release the arrays before the next step overwrites them."""
        self._states = None


@dataclass(frozen=True)
class Sampled:
    """One sampled continuation.

    Attributes:
        token_ids: the sampled tokens; includes the end token if it was sampled.
        logprobs: log-probability of each token in the distribution from which it was sampled, with
            temperature, filters and all other settings of the sampling.
        weights_version: the `version` of the weights.
        ended: whether an end token was sampled; False if the maximum length truncated it.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    weights_version: int
    ended: bool = True


@runtime_checkable
class Rollout(Protocol):
    """An object that completes prompts."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Mapping[str, Any],
        weights: Weights,
        *,
        seeds: Sequence[int] | None = None,
        images: Mapping[str, np.ndarray] | None = None,
    ) -> list[Sampled]:
        """Complete each prompt.

        Args:
            prompts: token ids.
            params: settings of the sampling: `max_tokens`, `temperature`, `top_p`, `top_k`,
                `min_p`, and further settings of the implementation.
            weights: the weights to sample with; readable until this call returns.
            seeds: one per prompt; equal seeds, prompts, settings and weights produce equal tokens.
            images: arrays of the images of the prompts by name, [prompts, ...], padded with zeros;
                passed only for models of images.

        Returns:
            One continuation per prompt, in the order of the prompts.
        """
        ...


def until_end(answer: list[int], model: LanguageModel) -> list[int]:
    """Return an answer up to its first end-of-sequence token, that token included.

    Args:
        answer: generated token ids.
        model: the model, whose configuration has the end-of-sequence tokens.
    """
    ends = model.config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    at = next((i for i, token in enumerate(answer) if token in ends), len(answer) - 1)
    return answer[: at + 1]
