"""The part of a vision-language body that its decoder answers.

Legend: b rows, s positions, d hidden.
"""

from __future__ import annotations

from typing import Any

from ed_infra.inputs import Features
from ed_infra.outputs import BaseModelOutput
from ed_layers.projections.embed import Embed
from jaxtyping import Array, Int


class OverDecoder:
    """Methods of a body whose decoder is `language_model`."""

    language_model: Any

    @property
    def features(self) -> int:
        """Size of the hidden states, d."""
        return self.language_model.features

    @property
    def embed_tokens(self) -> Embed:
        """The token embedding."""
        return self.language_model.embed_tokens

    def __call__(
        self,
        input_ids: Int[Array, "b s"] | None = None,
        *,
        features: Features | None = None,
        **inputs: Any,
    ) -> BaseModelOutput:
        """Run the decoder; see `ed_models.body.decoder.Decoder`."""
        output = self.language_model(input_ids, features=features, **inputs)
        updates = {f"language_model/{path}": value for path, value in output.updates.items()}
        return output.replace(updates=updates)

    def cache_specs(self):
        """Return the memory of each layer of the decoder."""
        return self.language_model.cache_specs()

    def prompt_class(self, prompt_len: int) -> int:
        """Return the class of a prompt length; see `Decoder.prompt_class`."""
        return self.language_model.prompt_class(prompt_len)
