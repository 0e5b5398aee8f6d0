"""The paged cache of the serving engine: a pool of pages that sequences share.

Legend: P pages, g kv heads, k numbers of a head, n scales of a head, T flat tokens, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo
from jaxtyping import Array, Float

from ed_layers.cache.codes import Codes, Format, Numbers, encode
from ed_layers.cache.protocol import keys_values
from ed_layers.cache.ragged import RaggedBatch
from ed_layers.cache.spec import LayerSpecs, uniform
from ed_layers.cache.storage import (
    Layer,
    Layout,
    PerLayer,
    allocate,
    locate,
    place,
    update_layer,
)


@partial(
    jax.tree_util.register_dataclass, data_fields=["pages"], meta_fields=["group", "value_dim"]
)
@dataclass(frozen=True)
class PagedCache:
    """Pages [P, page_size, g, 2, k] per layer, keys and values side by side *inside* a head.

    That order keeps a head's K and V on the same device when heads are sharded, and is a free
    reshape of the `2K` axis that TPU's ragged paged attention takes. Scales of quantized pages are
    [P, g, 2, n, page_size].

    Attributes:
        pages: per layer [P, page_size, g, 2, k]; codes and scales if quantized.
        group: which `slots` and `page_table` of the RaggedBatch these layers use.
        value_dim: numbers of a value where it is not as wide as a key: the narrower one is padded.
    """

    pages: PerLayer
    group: str = "full"
    value_dim: int | None = None

    @classmethod
    def create(
        cls,
        specs: Sequence[LayerSpecs],
        *,
        num_pages: int,
        page_size: int,
        dtype: jnp.dtype = jnp.float32,
        layout: Layout = "stacked",
        sharding: jax.sharding.Sharding | None = None,
        group: str = "full",
        format: Format | None = None,
    ) -> PagedCache:
        """Allocate an empty pool.

        Args:
            specs: one per layer, all equal.
            num_pages, page_size: pages in the pool, tokens per page.
            dtype: of what is stored, unless it is quantized.
            sharding: of one layer's [P, page_size, g, 2, k].
            format: of 8-bit pages; None stores `dtype`.
        """
        spec = uniform(specs)
        heads, size = spec.num_kv_heads, max(spec.head_dim, spec.values)
        shape = (num_pages, page_size, heads, 2, size)

        def make(lead: tuple[int, ...]) -> Numbers:
            stacked = bool(lead)
            if format is None:
                return place(jnp.zeros((*lead, *shape), dtype), sharding, stacked=stacked)
            scale = jnp.zeros((*lead, num_pages, heads, 2, format.groups(size), page_size))
            return Codes(
                place(jnp.zeros((*lead, *shape), format.dtype), sharding, stacked=stacked),
                place(scale.astype(jnp.float32), of_page_scales(sharding), stacked=stacked),
            )

        return cls(allocate(len(specs), layout, make), group, spec.value_dim)

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return first_of(self.pages).shape[-4]

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        return first_of(self.pages).shape[-5]

    def update(
        self,
        layer: Layer,
        kv: tuple[Float[Array, "1 T g k"], Float[Array, "1 T g d"]] | None,
        *,
        mask_info: MaskInfo | None = None,
        ragged: RaggedBatch,
        group: str = "full",
    ) -> tuple[PagedCache, Pages]:
        """Scatter this step's keys and values into their slots; padding tokens are dropped."""
        size = first_of(self.pages).shape[-1]
        both = (jnp.pad(x[0], ((0, 0), (0, 0), (0, size - x.shape[-1]))) for x in keys_values(kv))
        new = jnp.stack(list(both), axis=2)
        group = ragged.group_of(self.group)
        page, offset = jnp.divmod(ragged.slots[group], self.page_size)

        def update(pages: Numbers, at: tuple[Layer, ...]) -> Numbers:
            if not isinstance(pages, Codes):
                new_pages: Any = new.astype(pages.dtype)
                return pages.at[(*at, page, offset)].set(new_pages, mode="drop")
            # `encode` takes slots before numbers: a slot axis of one token each.
            codes: Any = encode(new[..., None, :], pages)
            heads = (slice(None),) * 3
            return Codes(
                pages.values.at[(*at, page, offset)].set(codes.values[..., 0, :], mode="drop"),
                pages.scale.at[(*at, page, *heads, offset)].set(codes.scale[..., 0], mode="drop"),
            )

        cache = replace(self, pages=update_layer(self.pages, layer, update))
        return cache, Pages(*locate(cache.pages, layer), group, self.value_dim)


@dataclass(frozen=True)
class Pages:
    """What attention over pages reads: only the pages that a sequence has are ever gathered, never
    the pool of a layer.

    Attributes:
        pool: [P, page_size, g, 2, k], or with a leading layer axis; codes and scales if quantized.
        at: index of the layer in it, `(layer,)` or `()`.
        group: which page table of the RaggedBatch.
        value_dim: numbers of a value; None = as many as a key.
    """

    pool: Numbers
    at: tuple[Layer, ...]
    group: str
    value_dim: int | None = None


def first_of(pages: PerLayer) -> Numbers:
    """The pages of some layer, or of all: their last five dims are those of one."""
    return pages[0] if isinstance(pages, tuple) else pages


def of_page_scales(sharding: jax.sharding.Sharding | None) -> jax.sharding.Sharding | None:
    """Sharding of [P, g, 2, n, page_size] where [P, page_size, g, 2, k] is sharded so."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    pages, page, heads = (*sharding.spec, *(None,) * 3)[:3]
    spec = jax.sharding.PartitionSpec(pages, heads, None, None, page)
    return jax.sharding.NamedSharding(sharding.mesh, spec)
