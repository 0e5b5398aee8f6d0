"""The engine as the `Rollout` of a trainer: completions by the weights that are being trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ed_esurge import SamplingParams, eSurge
from ed_trainers.rollout import Sampled, Weights


class EngineRollout:
    """Completes prompts by an engine that borrows the trainer's weights for each call.

    Args:
        engine: serves a model of the learner's architecture; nobody else uses it while training.
    """

    def __init__(self, engine: eSurge):
        self.engine = engine

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Mapping[str, Any], weights: Weights
    ) -> list[Sampled]:
        """Complete each prompt; see `ed_trainers.rollout.Rollout.generate`.

        Args:
            prompts: token ids.
            params: fields of `SamplingParams`.
            weights: what to sample with; borrowed until this call returns.
        """
        sampling = SamplingParams(**{**params, "n": 1, "logprobs": 0})
        with self.engine.weights(weights.model):
            outputs = self.engine.generate([list(prompt) for prompt in prompts], sampling)
        return [
            Sampled(
                completion.token_ids,
                [
                    position[token].logprob
                    for token, position in zip(
                        completion.token_ids, completion.logprobs or (), strict=True
                    )
                ],
                weights.version,
            )
            for completion in (output.outputs[0] for output in outputs)
        ]
