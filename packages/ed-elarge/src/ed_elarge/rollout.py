"""The engine as the `Rollout` of a trainer: completions by the weights that are being trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ed_esurge import EngineConfig, SamplingParams, eSurge
from ed_esurge.core.commands import DropWeights
from ed_esurge.tokenizer import Tokenizer
from ed_infra.errors import ConfigError
from ed_models.heads import CausalLM
from ed_trainers.rollout import Sampled, Weights


class EngineRollout:
    """Completes prompts by an engine that borrows the trainer's weights for each call.

    Where the model lies on devices of several processes, each of them makes the engine and the
    calls, so that all take the same steps.

    Args:
        engine: serves a model of the learner's architecture; nobody else uses it while training.
    """

    def __init__(self, engine: eSurge):
        self.engine = engine

    @classmethod
    def of(
        cls, model: CausalLM, tokenizer: Tokenizer | None, config: EngineConfig, *, length: int
    ) -> EngineRollout:
        """Make an engine for the rollouts of a run.

        Args:
            model: the learner; the engine has the arrays of its weights within calls only.
            tokenizer: says which tokens end a completion.
            config: options of the engine. What it leaves open is chosen for rollouts: the longest
                context is that of a row, shapes are compiled when they first come, and the engine
                is silent.
            length: of a row, in tokens.

        Raises:
            ConfigError: the context is too short for a row.
        """
        for_rollouts = {"max_model_len": length, "compile_runner": False, "silent_mode": True}
        left = {k: v for k, v in for_rollouts.items() if k not in config.model_fields_set}
        engine = eSurge(model, tokenizer, config.replace(**left))
        if engine.max_model_len < length:
            raise ConfigError(
                f"prompts and completions take up to {length} tokens (max_prompt_length + "
                f"max_completion_length), and the engine has {engine.max_model_len}: lower one of "
                "them, or raise esurge.max_model_len or the model's max_position_embeddings"
            )
        with engine.together():
            engine.execute(DropWeights())
        return cls(engine)

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
        fixed = {**params, "n": 1, "logprobs": 0, "detokenize": bool(params.get("stop"))}
        many = [{"seed": seed} for seed in seeds] if seeds is not None else [{}] * len(prompts)
        sampling = [SamplingParams(**{**fixed, **own}) for own in many]
        with self.engine.together(), self.engine.weights(weights.model):
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
                completion.finish_reason != "length",
            )
            for completion in (output.outputs[0] for output in outputs)
        ]
