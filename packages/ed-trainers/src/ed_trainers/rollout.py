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
from ed_layers.updated import Updated
from ed_models.protocol import LanguageModel
from flax import nnx


def changing_variables(other_variables: nnx.State) -> nnx.State:
    """Return the variables with their own update rule, among those without a gradient."""
    flat_variables = [
        (path, variable)
        for path, variable in nnx.to_flat_state(other_variables)
        if isinstance(variable, Updated) or not isinstance(variable, nnx.Variable)
    ]
    return nnx.from_flat_state(flat_variables)


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
    def trained(self) -> nnx.State:
        """The variables of `state` that training changes."""
        if self._states is None:
            return self.state
        graphstate, other_variables = self._states
        return nnx.merge_state(graphstate, changing_variables(other_variables))

    @property
    def params(self) -> nnx.State:
        """The trained parameters.

        Raises:
            EasyDeLError: the next step has begun.
        """
        return self.state if self._states is None else self._states[0]

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
        weights_version: the `version` of the weights; of the first token, if the weights changed
            while the continuation was sampled.
        ended: whether an end token was sampled; False if the maximum length truncated it.
        versions: pairs of a version and the number of consecutive sampled tokens that have it;
            empty: all tokens have `weights_version`.
        given: pairs of the first token and the number of tokens that an environment wrote, in
            order. The model is not trained on them, and their log-probabilities are 0.
        rewards: the value of each reward function, NaN for None, and the reward of an environment;
            None: not scored yet.
        experts: experts of each token of the prompt and the continuation but the last one, int16
            [tokens, layers, k], -1 for a choice of the router; None: not recorded.
        masks: for each token the tokens from which it was sampled, int32 and ascending; empty for
            tokens of an environment. None: not recorded.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    weights_version: int
    ended: bool = True
    versions: Sequence[tuple[int, int]] = ()
    given: Sequence[tuple[int, int]] = ()
    rewards: Sequence[float] | None = None
    experts: np.ndarray | None = None
    masks: Sequence[np.ndarray] | None = None


@dataclass(frozen=True)
class SampleRequest:
    """The samples of one generation.

    Attributes:
        number: number of the generation, from 0.
        prompts: token ids of each prompt.
        copies: number of samples of each prompt.
        params: settings of the sampling; see `Rollout.generate`.
        seeds: one per sample, ordered by prompt.
        rows: for each prompt the fields of its row of data, and `prompt`, the prompt as written.
    """

    number: int
    prompts: Sequence[Sequence[int]]
    copies: int
    params: Mapping[str, Any]
    seeds: Sequence[int]
    rows: Sequence[Mapping[str, Any]]


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
                `min_p`, and further settings of the implementation. With an environment,
                `max_tokens` is a list with a number for each prompt.
            weights: the weights to sample with; readable until this call returns.
            seeds: one per prompt; equal seeds, prompts, settings and weights produce equal tokens.
            images: arrays of the images of the prompts by name, [prompts, ...], padded with zeros;
                passed only for models of images.

        Returns:
            One continuation per prompt, in the order of the prompts.
        """
        ...


@runtime_checkable
class AheadRollout(Rollout, Protocol):
    """A rollout that samples later generations while the trainer trains.

    Before each generation the trainer calls `publish`, then `issue` for every generation of the run
    that lies at most `max_staleness` ahead, then `take`.
    """

    @property
    def max_staleness(self) -> int:
        """Number of generations that may be issued ahead."""
        ...

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Names of the rewards of the samples that are no reward functions."""
        ...

    def publish(self, weights: Weights) -> None:
        """Copy the weights; all later tokens are sampled with them."""
        ...

    def issue(self, request: SampleRequest) -> None:
        """Begin to sample a generation; without effect for an issued generation."""
        ...

    def take(self, number: int, version: int) -> tuple[list[Sampled], dict[str, float]]:
        """Wait for a generation, and record that the step `version` consumes it.

        Returns:
            The samples in the order of the request, and figures for the log.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values, for a checkpoint."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that the samples of a checkpoint still exist."""
        ...

    def close(self) -> None:
        """End all processes of the rollout."""
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
