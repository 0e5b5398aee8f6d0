"""The body of language models that read images or recordings: towers and a decoder.

Legend: b rows, s positions, d hidden.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import jax
import jax.numpy as jnp
from ed_infra import registry
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.inputs import Features
from ed_infra.outputs import BaseModelOutput
from ed_layers.projections.embed import Embed
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from ed_models.base.module import EasyDeLBaseModule


class ConditionalModel(EasyDeLBaseModule):
    """Towers, and a decoder under `language_model`, which the model type of its configuration
    selects."""

    language_model: Any

    def __init__(
        self,
        config: EasyDeLBaseConfig,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        *,
        rngs: nnx.Rngs,
    ):
        super().__init__(config, dtype, param_dtype, precision)
        self.add_towers(config, rngs)
        text = self.decoder_config(config)
        decoder = registry.get_module(TaskType.CAUSAL_LM, text.model_type)
        self.language_model = decoder.body_class(text, dtype, param_dtype, precision, rngs=rngs)

    @abstractmethod
    def add_towers(self, config: EasyDeLBaseConfig, rngs: nnx.Rngs) -> None:
        """Create the parts before the decoder."""

    @staticmethod
    def decoder_config(config: EasyDeLBaseConfig) -> Any:
        """Return the configuration of the decoder."""
        return config.text_config

    @property
    def features(self) -> int:
        """Size of the hidden states, d."""
        return self.language_model.features

    @property
    def encoded_features(self) -> int:
        """Size of the embeddings that `encode` returns: d, or a multiple of d."""
        return self.features

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
