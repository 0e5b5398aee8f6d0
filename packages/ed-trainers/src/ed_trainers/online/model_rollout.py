"""Completions by a model that no engine serves: a teacher, a reference, a mixture of two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from ed_infra.errors import ConfigError
from ed_models.base.methods import EasyGenerationMixin
from ed_models.generation.options import GenerationOptions
from ed_models.protocol import LanguageModel

from ed_trainers.rollout import Sampled, Weights


class ModelRollout:
    """Completes prompts by `generate` of a model, in batches.

    Args:
        get_model: makes the model, of the learner with its present weights.
        rows: number of prompts of a batch.
    """

    def __init__(self, get_model: Callable[[LanguageModel], object], rows: int):
        self._model_of, self._rows = get_model, rows

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

        A draw depends on the seed of the first prompt in the group that is completed together, and
        on the position of the prompt in this group.
        """
        model = self._model_of(weights.model)
        if not isinstance(model, EasyGenerationMixin):
            raise ConfigError(f"{type(model).__name__} has no generate: it completes no prompts")
        settings: dict[str, Any] = {name: params[name] for name in ("temperature", "top_p")}
        # In these settings, zero means "no limit".
        settings |= {name: params[name] for name in ("top_k", "min_p") if params.get(name)}
        ends, lengths = _end_tokens(model), params["max_tokens"]
        limits = lengths if isinstance(lengths, Sequence) else [lengths] * len(prompts)
        sampled: list[Sampled] = []
        for start in range(0, len(prompts), self._rows):
            prompt_batch = [list(prompt) for prompt in prompts[start : start + self._rows]]
            filled = [*prompt_batch, *[prompt_batch[0]] * (self._rows - len(prompt_batch))]
            places = [start + (n if n < len(prompt_batch) else 0) for n in range(self._rows)]
            arrays = {name: x[places] for name, x in (images or {}).items()}
            width = max(map(len, filled))
            ids, mask = np.zeros((2, self._rows, width), np.int32)
            for row, prompt in enumerate(filled):
                ids[row, width - len(prompt) :] = prompt
                mask[row, width - len(prompt) :] = 1
            output = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(limits[start : start + self._rows]),
                do_sample=True,
                seed=0 if seeds is None else seeds[start],
                output_logprobs=True,
                logprobs_mode="processed_logprobs",
                **arrays,
                **settings,
            )
            assert output.logprobs is not None
            for row in range(len(prompt_batch)):
                answer = output.sequences[row, width : width + limits[start + row]].tolist()
                end = next((i for i, token in enumerate(answer) if token in ends), None)
                answer_slice = slice(len(answer) if end is None else end + 1)
                logprobs = output.logprobs[row, answer_slice].tolist()
                sampled.append(
                    Sampled(answer[answer_slice], logprobs, weights.version, end is not None)
                )
        return sampled


def _end_tokens(model: EasyGenerationMixin) -> tuple[int, ...]:
    """The tokens that end a completion, as `generate` reads them."""
    return GenerationOptions.resolve(
        arguments={},
        generation_config=None,
        checkpoint=model.generation_json,
        model_config=model.config,
        prompt_length=1,
    ).eos_token_id
