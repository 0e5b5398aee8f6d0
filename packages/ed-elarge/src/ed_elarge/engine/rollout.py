"""The engine as the `Rollout` of a trainer: completions with the current weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from ed_esurge import EngineConfig, SamplingParams, eSurge
from ed_esurge.core.commands import EncoderInput
from ed_esurge.model import placed_items
from ed_esurge.tokenizer import Tokenizer
from ed_models.tasks.causal_lm import CausalLM
from ed_trainers.rollout import Sampled, Weights

from ed_elarge.engine.lending import LentEngine


class EngineRollout:
    """Completes prompts with an engine that borrows the trainer's weights for each call.

    If the model is sharded over several processes, each process creates the engine and makes the
    same calls, so that all processes execute the same steps.

    Args:
        engine: An engine for the trained model's architecture, for exclusive use by the training.
    """

    def __init__(self, engine: eSurge | LentEngine):
        self._lent = engine if isinstance(engine, LentEngine) else LentEngine(engine)

    @property
    def engine(self) -> eSurge:
        """The engine; it has weights only during a call."""
        return self._lent.engine

    @classmethod
    def of(
        cls, model: CausalLM, tokenizer: Tokenizer | None, config: EngineConfig, *, length: int
    ) -> EngineRollout:
        """Create an engine for rollouts only; see `LentEngine.of`."""
        return cls(LentEngine.of(model, tokenizer, config, length=length))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Mapping[str, Any],
        weights: Weights,
        *,
        seeds: Sequence[int] | None = None,
        images: Mapping[str, np.ndarray] | None = None,
    ) -> list[Sampled]:
        """Complete each prompt; see `ed_trainers.rollout.Rollout.generate`.

        Args:
            prompts: Token ids of each prompt.
            params: Fields of `SamplingParams`; `max_tokens` is a number, or one for each prompt.
            weights: The weights, borrowed until the call returns.
            seeds: A seed for each prompt.
            images: Arrays of the images of the prompts by name, with a row for each prompt.
        """
        fixed = {
            **params,
            "n": 1,
            "logprobs": 0,
            "logprobs_mode": "processed_logprobs",
            "detokenize": bool(params.get("stop")),
        }
        many: list[dict[str, int]] = [{} for _ in prompts]
        lengths = params["max_tokens"]
        for number, own_params in enumerate(many):
            if seeds is not None:
                own_params["seed"] = seeds[number]
            if isinstance(lengths, Sequence):
                own_params["max_tokens"] = lengths[number]
        sampling = [SamplingParams(**{**fixed, **own_params}) for own_params in many]
        with self._lent.serving(weights) as engine:
            inputs = None if images is None else _items(engine, prompts, images)
            outputs = engine.generate(
                [list(prompt) for prompt in prompts], sampling, encoder_inputs=inputs
            )
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
                completion.finish_reason != "length",
                experts=completion.routed_experts,
                masks=completion.sampling_masks,
            )
            for completion in (output.outputs[0] for output in outputs)
        ]


def _items(
    engine: eSurge, prompts: Sequence[Sequence[int]], images: Mapping[str, np.ndarray]
) -> list[tuple[EncoderInput, ...]]:
    """Return the images of each prompt as inputs of the engine."""
    runner = engine.loop.runner
    assert runner.items is not None, "the trained model reads images"
    tokens: tuple[int, ...] = cast(Any, runner.model).placeholder_tokens
    return [
        placed_items(runner.items, {name: x[row] for name, x in images.items()}, prompt, tokens)
        for row, prompt in enumerate(prompts)
    ]
