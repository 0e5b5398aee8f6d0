"""The paged cache of the serving engine: a pool of pages that sequences share.

Legend: P pages, g kv heads, k head dim, T flat tokens, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ed_layers.cache.dense import place, uniform
from ed_layers.cache.protocol import (
    Layer,
    LayerCacheSpec,
    Layout,
    PerLayer,
    allocate,
    locate,
    update_layer,
)
from ed_layers.cache.ragged import RaggedBatch


@partial(jax.tree_util.register_dataclass, data_fields=["pages"], meta_fields=["group"])
@dataclass(frozen=True)
class PagedCache:
    """Pages [P, page_size, g, 2, k] per layer, keys and values side by side *inside* a head.

    That order keeps a head's K and V on the same device when heads are sharded, and is a free
    reshape of the `2K` axis that TPU's ragged paged attention takes.

    Attributes:
        pages: per layer [P, page_size, g, 2, k].
        group: which `slots` and `page_table` of the RaggedBatch these layers use.
    """

    pages: PerLayer
    group: str = "full"

    @classmethod
    def create(
        cls,
        specs: Sequence[LayerCacheSpec],
        *,
        num_pages: int,
        page_size: int,
        dtype: jnp.dtype = jnp.float32,
        layout: Layout = "stacked",
        sharding: jax.sharding.Sharding | None = None,
        group: str = "full",
    ) -> PagedCache:
        """Allocate an empty pool.

        Args:
            specs: one per layer, all equal.
            num_pages, page_size: pages in the pool, tokens per page.
            sharding: of one layer's [P, page_size, g, 2, k].
        """
        spec = uniform(specs)
        shape = (num_pages, page_size, spec.num_kv_heads, 2, spec.head_dim)

        def make(lead: tuple[int, ...]) -> jax.Array:
            return place(jnp.zeros((*lead, *shape), dtype), sharding, stacked=bool(lead))

        return cls(pages=allocate(len(specs), layout, make), group=group)

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return jax.tree.leaves(self.pages)[0].shape[-4]

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        return jax.tree.leaves(self.pages)[0].shape[-5]

    def update(
        self,
        layer: Layer,
        kv: tuple[Float[Array, "1 T g k"], Float[Array, "1 T g k"]],
        *,
        mask_info: MaskInfo | None = None,
        ragged: RaggedBatch,
        group: str = "full",
    ) -> tuple[PagedCache, Pages]:
        """Scatter this step's keys and values into their slots; padding tokens are dropped."""
        new = jnp.stack([kv[0][0], kv[1][0]], axis=2)
        page, offset = jnp.divmod(ragged.slots[self.group], self.page_size)

        def update(pages: jax.Array, at: tuple) -> jax.Array:
            return pages.at[(*at, page, offset)].set(new.astype(pages.dtype), mode="drop")

        cache = replace(self, pages=update_layer(self.pages, layer, update))
        return cache, Pages(*locate(cache.pages, layer), self.group)


@dataclass(frozen=True)
class Pages:
    """What attention over pages reads: only the pages that a sequence has are ever gathered, never
    the pool of a layer.

    Attributes:
        pool: [P, page_size, g, 2, k], or with a leading layer axis.
        at: index of the layer in it, `(layer,)` or `()`.
        group: which page table of the RaggedBatch.
    """

    pool: jax.Array
    at: tuple[Layer, ...]
    group: str
