"""The geometric mixture of two policies, which samples as one model.

Munos et al., arXiv:2312.00886, section 7.1: at each token the probabilities `p^(1 - c) * q^c`,
normalized. Both models process each prompt and each token, with separate caches.
"""

from __future__ import annotations

from typing import Any

import jax
from ed_infra.inputs import Inputs
from ed_infra.outputs import CausalLMOutput
from ed_models.base.methods import EasyGenerationMixin
from ed_models.protocol import LanguageModel
from flax import nnx


class GeometricMixture(EasyGenerationMixin, nnx.Module):
    """Two models of one vocabulary, mixed where they generate; it shares their variables.

    Args:
        model: the first; its configuration has the special tokens.
        other_model: the second.
        coefficient: c, the share of the second: 0 is the first alone, 1 the second.
    """

    def __init__(self, model: LanguageModel, other_model: LanguageModel, coefficient: float):
        self.model, self.other = model, other_model
        self.coefficient = coefficient
        self.config = model.config
        self.generation_json: str | None = getattr(model, "generation_json", None)

    def prepare_inputs_for_generation(
        self,
        input_ids: jax.Array,
        max_length: int,
        pad_token_id: int | None = None,
        *,
        attention_mask: jax.Array | None = None,
        inputs: Inputs | None = None,
    ) -> dict[str, Any]:
        """Return the arguments of `decode` for a prompt; the caches of both models in a pair."""
        model_inputs = [
            model.prepare_inputs_for_generation(
                input_ids, max_length, pad_token_id, attention_mask=attention_mask, inputs=inputs
            )
            for model in (self.model, self.other)
        ]
        caches = tuple(arguments.pop("past_key_values") for arguments in model_inputs)
        return {**model_inputs[0], "past_key_values": caches}

    def __call__(
        self, input_ids: jax.Array, *, past_key_values: Any, logits_at: object, **inputs: Any
    ) -> CausalLMOutput:
        """Logits of the mixture, up to a constant of each token."""
        outputs = [
            model(input_ids, past_key_values=cache, logits_at=logits_at, **inputs)
            for model, cache in zip((self.model, self.other), past_key_values, strict=True)
        ]
        logits, other_logits = (output.logits for output in outputs)
        assert logits is not None
        assert other_logits is not None
        return CausalLMOutput(
            logits=(1 - self.coefficient) * logits + self.coefficient * other_logits,
            past_key_values=tuple(output.past_key_values for output in outputs),
        )
