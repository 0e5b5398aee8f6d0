"""The caches of a model: which kind its layers need, in what format, and where it lies.

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
    """Adds caches to a model that says by `cache_specs` what its layers keep."""

    config: EasyDeLBaseConfig
    dtype: jnp.dtype

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """How the model stores its layers."""

    def cache_specs(self) -> Sequence[LayerSpecs]:
        """What each layer keeps: a LayerCacheSpec, a RecurrentSpec, or a tuple of several.

        Raises:
            TypeError: the model keeps nothing, because it is no decoder.
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
        """An empty contiguous cache for `max_length` tokens per row, sharded over batch and heads.

        With `use_sharded_kv_caching` also over slots, along `kv_cache_sharding_sequence_axis_name`;
        in 8 bits with `kv_cache_quantization_config`.

        Args:
            encoder_length: positions of the encoder that cross-attention reads.

        Returns:
            a HybridCache; where every layer has one memory and all are alike, a DenseCache or a
            WindowCache.

        Raises:
            ConfigError: the quantization is not for caches, or `encoder_length` is missing.
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
        """An empty pool of pages, sharded over heads; quantized as `init_cache`.

        Args:
            num_pages: pages of the pool; for layers of several groups one number for all, or
                group -> number.
            page_size: tokens per page.
            num_states: state slots that sequences can lease, for recurrent layers.

        Returns:
            a HybridCache; where every layer has one memory and all are alike, a PagedCache.
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

    def cache_dtype(self, dtype: DTypeLike | None = None) -> jnp.dtype:
        """`dtype`, else the config's `kvdtype`, else `attn_dtype`, else the compute dtype."""
        chosen = dtype or self.config.kvdtype or self.config.attn_dtype or self.dtype
        return jnp.dtype(chosen)

    def cache_sharding(
        self, axes: tuple[str | None, ...], shape: tuple[int, ...]
    ) -> NamedSharding | None:
        """Where one layer's cache goes; a dimension that does not divide is replicated.

        Slots are split over devices only where `use_sharded_kv_caching` asks for it.
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
