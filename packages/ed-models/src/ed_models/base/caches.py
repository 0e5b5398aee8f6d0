"""The caches of a model: their kind, format and sharding.

Legend: b batch, g kv heads, t slots, k head dim, P pages.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from ed_infra.config import EasyDeLBaseConfig
from ed_layers.attention import MECHANISMS
from ed_layers.cache import Cache, ContiguousCache, Format, HybridCache, PagedCache
from ed_layers.cache.spec import LayerSpecs
from ed_layers.cache.storage import Layout, StorageOptions
from jax.sharding import NamedSharding
from jax.typing import DTypeLike


class EasyCacheMixin:
    """Creates caches for a model whose `cache_specs` describe the memory of its layers."""

    config: EasyDeLBaseConfig
    dtype: jnp.dtype

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """The storage layout of the layers."""

    def cache_specs(self) -> Sequence[LayerSpecs]:
        """Return the memory of each layer: a LayerCacheSpec, a RecurrentSpec, or a tuple of these.

        Raises:
            TypeError: the model has no cache, because it is not a decoder.
        """
        raise TypeError(f"{type(self).__name__} has no layers that keep keys and values")

    def init_cache(
        self,
        batch_size: int,
        max_length: int,
        dtype: DTypeLike | None = None,
        *,
        encoder_length: int | None = None,
    ) -> ContiguousCache:
        """Create an empty contiguous cache for `max_length` tokens per row.

        The cache is sharded over batch and heads. `use_sharded_kv_caching` also shards the slots
        along `kv_cache_sharding_sequence_axis_name`. `kv_cache_quantization_config` selects 8 bits.

        Args:
            encoder_length: number of encoder positions that cross-attention reads.

        Returns:
            A HybridCache; or a DenseCache or WindowCache if all layers have the same single memory.

        Raises:
            ConfigError: caches do not support the quantization, or `encoder_length` is missing.
        """
        cache = HybridCache.create(
            self.cache_specs(),
            batch_size=batch_size,
            capacity=max_length,
            cross_capacity=encoder_length,
            **self._cache_options(dtype),
        ).simplest()
        assert not isinstance(cache, PagedCache), "no pages were asked for"
        return cache

    def init_paged_cache(
        self,
        num_pages: int | Mapping[str, int],
        page_size: int,
        dtype: DTypeLike | None = None,
        *,
        num_states: int | None = None,
    ) -> Cache:
        """Create an empty pool of pages, sharded over heads; quantized as in `init_cache`.

        Args:
            num_pages: pages of the pool; for several groups of layers one number for all groups, or
                group -> number.
            page_size: tokens per page.
            num_states: state slots for sequences, for recurrent layers.

        Returns:
            A HybridCache; or a PagedCache if all layers have the same single memory.
        """
        return HybridCache.create_paged(
            self.cache_specs(),
            num_pages=num_pages,
            page_size=page_size,
            num_states=num_states,
            **self._cache_options(dtype),
        ).simplest()

    def init_operations_cache(
        self,
        batch_size: int,
        max_length: int,
        *,
        page_size: int = 128,
        dtype: DTypeLike | None = None,
    ) -> Cache:
        """Create the cache that the layers and the attention mechanism need.

        If `attn_mechanism` or `decode_attn_mechanism` reads pages, the result is a pool for
        `batch_size` sequences of `max_length` tokens; otherwise it is the result of `init_cache`.

        Args:
            page_size: tokens per page.
        """
        for name in (self.config.attn_mechanism, self.config.decode_attn_mechanism):
            if name in MECHANISMS and MECHANISMS[name].reads == "pages":
                pages = batch_size * -(-max_length // page_size)
                return self.init_paged_cache(pages, page_size, dtype, num_states=batch_size)
        return self.init_cache(batch_size, max_length, dtype)

    def cache_dtype(self, dtype: DTypeLike | None = None) -> jnp.dtype:
        """Return `dtype`, or the config's `kvdtype`, `attn_dtype` or the compute dtype."""
        chosen = dtype or self.config.kvdtype or self.config.attn_dtype or self.dtype
        return jnp.dtype(chosen)

    def cache_sharding(
        self, axes: tuple[str | None, ...], shape: tuple[int, ...]
    ) -> NamedSharding | None:
        """Return the sharding of one layer's cache; a dimension that does not divide is replicated.

        Only `use_sharded_kv_caching` shards slots over devices.
        """
        config = self.config
        if config.mesh.size == 1:
            return None
        if not config.use_sharded_kv_caching:
            axes = tuple(None if axis == "key_sequence" else axis for axis in axes)
        spec = config.partition_manager.resolve(axes, mode="decode", shape=shape, mesh=config.mesh)
        return NamedSharding(config.mesh, spec)

    def _cache_options(self, dtype: DTypeLike | None) -> StorageOptions:
        return {
            "dtype": self.cache_dtype(dtype),
            "layout": self.layout,
            "sharding": self.cache_sharding,
            "format": Format.of(self.config.kv_cache_quantization_config),
        }
