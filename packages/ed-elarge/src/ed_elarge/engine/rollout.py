"""The engine as the `Rollout` of a trainer: completions by the weights that are being trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ed_esurge import EngineConfig, SamplingParams, eSurge
from ed_esurge.tokenizer import Tokenizer
from ed_models.tasks.causal_lm import CausalLM
from ed_trainers.rollout import Sampled, Weights

from ed_elarge.engine.lending import LentEngine


class EngineRollout:
    """Completes prompts by an engine that borrows the trainer's weights for each call.

    Where the model lies on devices of several processes, each of them makes the engine and the
    calls, so that all take the same steps.

    Args:
        engine: serves a model of the learner's architecture; nobody else uses it while training.
    """

    def __init__(self, engine: eSurge | LentEngine):
        self._lent = engine if isinstance(engine, LentEngine) else LentEngine(engine)

    @property
    def engine(self) -> eSurge:
        """The engine itself; it has weights within calls only."""
        return self._lent.engine

    @classmethod
    def of(
        cls, model: CausalLM, tokenizer: Tokenizer | None, config: EngineConfig, *, length: int
    ) -> EngineRollout:
        """Make an engine for the rollouts of a run alone; see `LentEngine.of`."""
        return cls(LentEngine.of(model, tokenizer, config, length=length))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Mapping[str, Any],
        weights: Weights,
        *,
        seeds: Sequence[int] | None = None,
    ) -> list[Sampled]:
        """Complete each prompt; see `ed_trainers.rollout.Rollout.generate`.

        Args:
            prompts: token ids.
            params: fields of `SamplingParams`.
            weights: what to sample with; borrowed until this call returns.
            seeds: of each prompt.
        """
        fixed = {
            **params,
            "n": 1,
            "logprobs": 0,
            "logprobs_mode": "processed_logprobs",
            "detokenize": bool(params.get("stop")),
        }
        many = [{"seed": seed} for seed in seeds] if seeds is not None else [{}] * len(prompts)
        sampling = [SamplingParams(**{**fixed, **own}) for own in many]
        with self._lent.serving(weights) as engine:
            outputs = engine.generate([list(prompt) for prompt in prompts], sampling)
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
            )
            for completion in (output.outputs[0] for output in outputs)
        ]
