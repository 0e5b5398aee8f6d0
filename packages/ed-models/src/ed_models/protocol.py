"""What trainers and the engine need from a model: they are written against this, not a class.

Legend: b batch, s sequence, d hidden, v vocabulary, n selected positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import jax
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.masks import MaskInfo
from ed_infra.outputs import CausalLMOutput
from ed_layers.cache import RaggedBatch
from ed_layers.cache.protocol import Cache, ContiguousCache
from ed_layers.cache.spec import LayerSpecs
from ed_layers.depth.stack import Layout
from ed_layers.projections.head import Head
from flax import nnx


class LanguageModel(Protocol):
    """A causal language model; `ed_models.tasks.causal_lm.CausalLM` is the one that is shipped."""

    @property
    def config(self) -> EasyDeLBaseConfig:
        """Its sealed configuration: architecture, mesh, partition rules."""
        ...

    @property
    def layout(self) -> Layout:
        """How its layers are stored."""
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
        ragged: RaggedBatch | None = None,
        logits_at: Any = "all",
        key: jax.Array | None = None,
        output_hidden_states: bool = False,
    ) -> CausalLMOutput:
        """One forward for training, generation and serving; see `CausalLM.__call__`."""
        ...

    def head(self) -> Head:
        """What turns hidden states [.., d] into logits [.., v]."""
        ...

    def init_cache(self, batch_size: int, max_length: int, dtype: Any = None) -> ContiguousCache:
        """An empty contiguous cache."""
        ...

    def prepare_inputs_for_generation(
        self,
        input_ids: jax.Array,
        max_length: int,
        pad_token_id: int | None = None,
        *,
        attention_mask: jax.Array | None = None,
    ) -> dict[str, Any]:
        """What `generate` calls the model with beside a prompt."""
        ...

    def init_paged_cache(
        self,
        num_pages: int | Mapping[str, int],
        page_size: int,
        dtype: Any = None,
        *,
        num_states: int | None = None,
    ) -> Cache:
        """An empty pool of pages, and of recurrent states where the model has any."""
        ...

    def prompt_class(self, prompt_len: int) -> int:
        """Class of prompt lengths: in equal ones, equal prefixes have equal keys and values."""
        ...

    def cache_specs(self) -> Sequence[LayerSpecs]:
        """What each layer keeps in a cache."""
        ...

    def split_module(self) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
        """`(graphdef, graphstate, graphother)`."""
        ...

    def shard_model(self, partition_rules: Any = None) -> Self:
        """The model with its parameters placed on the mesh."""
        ...

    def to_layout(self, layout: Layout) -> Self:
        """A copy whose layers are stored otherwise."""
        ...

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write the model in Hugging Face layout."""
        ...
