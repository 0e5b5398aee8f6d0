"""Audio-language models: recordings and text in, text out.

Legend: b batch, s sequence, i recordings of a row, m mel bins, f frames, n features of a row.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import jax
from ed_infra.errors import ConfigError
from ed_infra.inputs import Encoded, Features, Inputs
from ed_infra.outputs import CausalLMOutput
from jaxtyping import Array, Float, Int

from ed_models.tasks.causal_lm import CausalLM


class AudioBody(Protocol):
    """A body with an audio tower."""

    def encode(self, input_features: jax.Array, /) -> Encoded:
        """Return the features of all recordings of a row."""
        ...


class AudioTextLM(CausalLM):
    """An audio tower and a language model under `model`, and a head.

    The k-th token `config.audio_token_id` of a row gets the k-th feature of the recordings of the
    row.
    """

    input_names = (*CausalLM.input_names, "input_features")

    def encode(self, inputs: Inputs, *, key: jax.Array | None = None) -> Encoded:
        """Compute the features of `input_features` [b, i, m, f], in the order of the recordings."""
        return cast(AudioBody, self.model).encode(inputs["input_features"])

    def __call__(
        self,
        input_ids: Int[Array, "b s"] | None = None,
        *,
        input_features: Float[Array, "b i m f"] | None = None,
        features: Features | None = None,
        **inputs: Any,
    ) -> CausalLMOutput:
        """Run the audio tower, unless there are `features` or no recordings, and the language
        model.

        Args:
            input_ids: token ids [b, s], with one audio token for each feature.
            input_features: log-mel spectrograms; rows with fewer recordings are padded at the end.
            features: outputs of `encode` assigned to tokens, instead of `input_features`.
            inputs: further arguments of `CausalLM.__call__`.
        """
        if input_features is not None and features is None:
            if input_ids is None:
                raise ConfigError(
                    "input_features require input_ids, which contain the audio tokens"
                )
            encoded = self.encode(Inputs({"input_features": input_features}))
            audio_token_id: int = self.config.audio_token_id
            features = Features.at(encoded.embeddings, input_ids == audio_token_id)
        return super().__call__(input_ids, features=features, **inputs)
