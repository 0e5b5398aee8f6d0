"""The caches of a model: which kind its layers need, in what format, and where it lies.

Legend: b batch, g kv heads, t slots, k head dim, P pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from ed_infra.partition import PartitionManager
from ed_layers.attention import MECHANISMS
from ed_layers.cache import DenseCache, Format, HybridCache, PagedCache
from ed_layers.cache.spec import LayerSpecs, attention_specs


class EasyCacheMixin:
    """Adds caches to a model that says by `cache_specs` what its layers keep."""

    config: Any
    dtype: Any
    mesh: Any
    layout: Any

    def cache_specs(self) -> Sequence[LayerSpecs]:
        """What each layer keeps: a LayerCacheSpec, a RecurrentSpec, or a tuple of several.

        Raises:
            TypeError: the model keeps nothing; it is no decoder.
        """
        raise TypeError(f"{type(self).__name__} has no layers that keep keys and values")

    def init_cache(
        self,
        batch_size: int,
        max_length: int,
        dtype: Any = None,
        *,
        encoder_length: int | None = None,
    ) -> DenseCache | HybridCache:
        """An empty contiguous cache of `max_length` slots per row, sharded over batch and heads.

        With `use_sharded_kv_caching` also over slots, along `kv_cache_sharding_sequence_axis_name`;
        in 8 bits with `kv_cache_quantization_config`.

        Args:
            encoder_length: positions of the encoder that cross-attention reads.

        Returns:
            a DenseCache where all layers keep everything and are alike, else a HybridCache.

        Raises:
            ConfigError: the quantization is not for caches, or `encoder_length` is missing.
        """
        specs, options = self.cache_specs(), self._cache_options(dtype)
        alike = attention_specs(specs)
        if alike is None or len(set(alike)) > 1 or alike[0].group != "full":
            return HybridCache.create(
                specs,
                batch_size=batch_size,
                capacity=max_length,
                cross_capacity=encoder_length,
                place=self._place,
                **options,
            )
        shape = (batch_size, alike[0].num_kv_heads, max_length, alike[0].head_dim)
        return DenseCache.create(
            alike,
            batch_size=batch_size,
            capacity=max_length,
            sharding=self._place(("batch", "kv_heads", "key_sequence", None), shape),
            **options,
        )

    def init_paged_cache(
        self,
        num_pages: int | Mapping[str, int],
        page_size: int,
        dtype: Any = None,
        *,
        num_states: int | None = None,
    ) -> PagedCache | HybridCache:
        """An empty pool of pages, sharded over heads; quantized as `init_cache`.

        Args:
            num_pages: pages of the pool; for layers of several groups one number for all, or
                group -> number.
            page_size: tokens per page.
            num_states: recurrent states that sequences can lease.
        """
        specs, options = self.cache_specs(), self._cache_options(dtype)
        alike = attention_specs(specs)
        sizes: Any = {"num_pages": num_pages, "page_size": page_size}
        if alike is None or len(set(alike)) > 1 or not isinstance(num_pages, int):
            return HybridCache.create_paged(
                specs, num_states=num_states, place=self._place, **sizes, **options
            )
        width = max(alike[0].head_dim, alike[0].values)
        shape = (num_pages, page_size, alike[0].num_kv_heads, 2, width)
        return PagedCache.create(
            alike,
            num_pages=num_pages,
            page_size=page_size,
            sharding=self._place((None, None, "kv_heads", None, None), shape),
            group=alike[0].group,
            **options,
        )

    def init_operations_cache(
        self, batch_size: int, max_length: int, *, page_size: int = 128, dtype: Any = None
    ) -> DenseCache | HybridCache | PagedCache:
        """The cache that the model's layers and its attention mechanism need.

        Pages, enough for `batch_size` sequences of `max_length` tokens, where `attn_mechanism` or
        `decode_attn_mechanism` reads pages; else what `init_cache` gives.

        Args:
            page_size: tokens per page.
        """
        for name in (self.config.attn_mechanism, self.config.decode_attn_mechanism):
            if name in MECHANISMS and MECHANISMS[name].reads == "pages":
                pages = batch_size * -(-max_length // page_size)
                return self.init_paged_cache(pages, page_size, dtype, num_states=batch_size)
        return self.init_cache(batch_size, max_length, dtype)

    def cache_dtype(self, dtype: Any = None) -> jnp.dtype:
        """`dtype`, else the config's `kvdtype`, else `attn_dtype`, else the compute dtype."""
        chosen = dtype or self.config.kvdtype or self.config.attn_dtype or self.dtype
        return jnp.dtype(chosen)

    def cache_sharding(
        self, axes: tuple[str | None, ...], shape: tuple[int, ...]
    ) -> jax.sharding.Sharding | None:
        """Where one layer's cache goes; a dimension that does not divide is replicated."""
        if self.mesh.size == 1:
            return None
        sequence = self.config.kv_cache_sharding_sequence_axis_name
        axis = replace(self.config.partition_manager.axis, decode_key_sequence_axis=sequence)
        spec = PartitionManager(axis).resolve(axes, mode="decode", shape=shape, mesh=self.mesh)
        return jax.sharding.NamedSharding(self.mesh, spec)

    def _place(
        self, axes: tuple[str | None, ...], shape: tuple[int, ...]
    ) -> jax.sharding.Sharding | None:
        """`cache_sharding`, with slots split only where `use_sharded_kv_caching` asks for it."""
        if not self.config.use_sharded_kv_caching:
            axes = tuple(None if axis == "key_sequence" else axis for axis in axes)
        return self.cache_sharding(axes, shape)

    def _cache_options(self, dtype: Any) -> dict[str, Any]:
        return {
            "dtype": self.cache_dtype(dtype),
            "layout": self.layout,
            "format": Format.of(self.config.kv_cache_quantization_config),
        }
