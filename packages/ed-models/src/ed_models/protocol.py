"""The interface of models for trainers and the engine.

Legend: b batch, s sequence, d hidden, v vocabulary, n selected positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import jax
import numpy as np
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.inputs import Encoded, Features, Inputs
from ed_infra.masks import MaskInfo
from ed_infra.outputs import CausalLMOutput
from ed_layers.cache import RaggedBatch
from ed_layers.cache.protocol import Cache, ContiguousCache
from ed_layers.cache.spec import LayerSpecs
from ed_layers.depth.stack import Layout
from ed_layers.projections.head import Head
from flax import nnx
from jax.typing import DTypeLike


class LanguageModel(Protocol):
    """A language model; the classes in `ed_models.tasks` implement this protocol."""

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the arrays that `__call__` accepts from a batch."""
        ...

    @property
    def config(self) -> EasyDeLBaseConfig:
        """The sealed configuration: architecture, mesh, partition rules."""
        ...

    @property
    def layout(self) -> Layout:
        """The storage layout of the layers."""
        ...

    def __call__(
        self,
        input_ids: jax.Array | None = None,
        *,
        inputs_embeds: jax.Array | None = None,
        attention_mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        position_ids: jax.Array | None = None,
        mask_info: MaskInfo | None = None,
        past_key_values: Any = None,
        features: Features | None = None,
        ragged: RaggedBatch | None = None,
        logits_at: Any = "all",
        key: jax.Array | None = None,
        output_hidden_states: bool = False,
    ) -> CausalLMOutput:
        """Run the forward pass of training, generation or serving; see `CausalLM.__call__`."""
        ...

    def encode(self, inputs: Inputs, *, key: jax.Array | None = None) -> Encoded:
        """Compute the embeddings of images, or of the tokens of an encoder."""
        ...

    def batched_inputs(self, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arrays of prompts in the form that `__call__` accepts."""
        ...

    def decode(self, input_ids: jax.Array, **inputs: Any) -> CausalLMOutput:
        """Run the language model on tokens; see `EasyGenerationMixin.decode`."""
        ...

    def head(self) -> Head:
        """Return the head, which maps hidden states [.., d] to logits [.., v]."""
        ...

    def init_cache(
        self,
        batch_size: int,
        max_length: int,
        dtype: DTypeLike | None = None,
        *,
        encoder_length: int | None = None,
    ) -> ContiguousCache:
        """Create an empty contiguous cache; `encoder_length` = number of encoder positions."""
        ...

    def prepare_inputs_for_generation(
        self,
        input_ids: jax.Array,
        max_length: int,
        pad_token_id: int | None = None,
        *,
        attention_mask: jax.Array | None = None,
        inputs: Inputs | None = None,
    ) -> dict[str, Any]:
        """Return the arguments of `decode` for a prompt: mask, empty cache, further arrays."""
        ...

    def init_paged_cache(
        self,
        num_pages: int | Mapping[str, int],
        page_size: int,
        dtype: DTypeLike | None = None,
        *,
        num_states: int | None = None,
        encoder_length: int | None = None,
    ) -> Cache:
        """Create an empty pool of pages, and slots of states and encoder outputs."""
        ...

    def prompt_class(self, prompt_len: int) -> int:
        """Return the class of a prompt length: within a class, equal prefixes have equal keys."""
        ...

    def cache_specs(self) -> Sequence[LayerSpecs]:
        """Return the memory of each layer in a cache."""
        ...

    def split_module(self) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
        """Return `(graphdef, graphstate, graphother)`."""
        ...

    def shard_model(self, partition_rules: Any = None) -> Self:
        """Return the model with its parameters placed on the mesh."""
        ...

    def to_layout(self, layout: Layout) -> Self:
        """Return a copy with another storage layout of the layers."""
        ...

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write the model in Hugging Face layout."""
        ...
