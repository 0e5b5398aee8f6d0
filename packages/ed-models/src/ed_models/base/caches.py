"""The caches of a model: their kind, format and sharding.

Legend: b batch, g kv heads, t slots, k head dim, P pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

import jax.numpy as jnp
from ed_infra.config import EasyDeLBaseConfig
from ed_layers.attention import MECHANISMS
from ed_layers.cache import Cache, ContiguousCache, Format, HybridCache, PagedCache
from ed_layers.cache.spec import LayerSpecs
from ed_layers.cache.storage import Layout, StorageOptions
from jax.sharding import NamedSharding
from jax.typing import DTypeLike


class CachingModel(Protocol):
    """A model whose `cache_specs` describe the memory of its layers."""

    config: EasyDeLBaseConfig
    dtype: jnp.dtype

    @property
    def layout(self) -> Layout:
        """The storage layout of the layers."""
        ...

    def cache_specs(self) -> Sequence[LayerSpecs]:
        """Return the memory of each layer."""
        ...


def contiguous(
    model: CachingModel,
    batch_size: int,
    max_length: int,
    dtype: DTypeLike | None = None,
    encoder_length: int | None = None,
) -> ContiguousCache:
    """Create the cache of `EasyDeLBaseModule.init_cache`."""
    cache = HybridCache.create(
        model.cache_specs(),
        batch_size=batch_size,
        capacity=max_length,
        cross_capacity=encoder_length,
        rings=not model.config.batch_invariant,  # a sum over a ring begins at another token
        **_options(model, dtype),
    ).simplest()
    assert not isinstance(cache, PagedCache)
    return cache


def create_paged_cache(
    model: CachingModel,
    num_pages: int | Mapping[str, int],
    page_size: int,
    dtype: DTypeLike | None = None,
    num_states: int | None = None,
    encoder_length: int | None = None,
) -> Cache:
    """Create the cache of `EasyDeLBaseModule.init_paged_cache`."""
    return HybridCache.create_paged(
        model.cache_specs(),
        num_pages=num_pages,
        page_size=page_size,
        num_states=num_states,
        cross_capacity=encoder_length,
        **_options(model, dtype),
    ).simplest()


def for_operations(
    model: CachingModel,
    batch_size: int,
    max_length: int,
    page_size: int,
    dtype: DTypeLike | None = None,
) -> Cache:
    """Create the cache of `EasyDeLBaseModule.init_operations_cache`."""
    for name in (model.config.attn_mechanism, model.config.decode_attn_mechanism):
        if name in MECHANISMS and MECHANISMS[name].reads == "pages":
            pages = batch_size * -(-max_length // page_size)
            return create_paged_cache(model, pages, page_size, dtype, num_states=batch_size)
    return contiguous(model, batch_size, max_length, dtype)


def get_cache_dtype(model: CachingModel, dtype: DTypeLike | None = None) -> jnp.dtype:
    """Return `dtype`, or the config's `kvdtype`, `attn_dtype` or the compute dtype."""
    config = model.config
    return jnp.dtype(dtype or config.kvdtype or config.attn_dtype or model.dtype)


def get_cache_sharding(
    config: EasyDeLBaseConfig, axes: tuple[str | None, ...], shape: tuple[int, ...]
) -> NamedSharding | None:
    """Return the sharding of one layer's cache; see `EasyDeLBaseModule.init_cache`."""
    if config.mesh.size == 1:
        return None
    if not config.use_sharded_kv_caching:
        axes = tuple(None if axis == "key_sequence" else axis for axis in axes)
    spec = config.partition_manager.resolve(axes, mode="decode", shape=shape, mesh=config.mesh)
    return NamedSharding(config.mesh, spec)


def _options(model: CachingModel, dtype: DTypeLike | None) -> StorageOptions:
    config = model.config
    return {
        "dtype": get_cache_dtype(model, dtype),
        "layout": model.layout,
        "sharding": partial(get_cache_sharding, config),
        "format": Format.of(config.kv_cache_quantization_config),
    }
