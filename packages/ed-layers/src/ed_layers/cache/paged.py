"""The paged cache of the serving engine: a pool of pages that sequences share.

Legend: P pages, g kv heads, k numbers of a head, n scales of a head, T flat tokens, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo
from jax.typing import DTypeLike

from ed_layers.cache.codes import Format, Numbers, encode, map_slots
from ed_layers.cache.protocol import KeysValues, keys_values
from ed_layers.cache.protocol import Pages as Pages
from ed_layers.cache.ragged import RaggedBatch
from ed_layers.cache.spec import LayerSpecs, uniform
from ed_layers.cache.storage import (
    At,
    Layer,
    Layout,
    PerLayer,
    Place,
    allocate_numbers,
    layout_of,
    locate,
    resolve,
    update_layer,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedCache:
    """Pages [P, page_size, g, 2, k] per layer, keys and values side by side *inside* a head.

    That order keeps a head's K and V on the same device when heads are sharded, and is a free
    reshape of the `2K` axis that TPU's ragged paged attention takes. Scales of quantized pages are
    [P, g, 2, n, page_size]. Where values are part of their keys, the axis of two has one entry.

    Attributes:
        pages: per layer [P, page_size, g, 2, k]; codes and scales if quantized.
        group: which `slots` and `page_table` of the RaggedBatch these layers use.
        value_dim: numbers of a value where it is not as wide as a key: the narrower one is padded.
    """

    pages: PerLayer
    group: str = field(default="full", metadata={"static": True})
    value_dim: int | None = field(default=None, metadata={"static": True})

    @classmethod
    def create(
        cls,
        specs: Sequence[LayerSpecs],
        *,
        num_pages: int,
        page_size: int,
        dtype: DTypeLike = jnp.float32,
        layout: Layout = "stacked",
        sharding: Place = None,
        group: str = "full",
        format: Format | None = None,
    ) -> PagedCache:
        """Allocate an empty pool.

        Args:
            specs: one per layer, all equal.
            num_pages, page_size: pages in the pool, tokens per page.
            dtype: of what is stored, unless it is quantized.
            sharding: of one layer's [P, page_size, g, 2, k]; see `Place`.
            group: see the attribute.
            format: of 8-bit pages; None stores `dtype`.
        """
        spec = uniform(specs)
        if format is not None:
            format.groups(spec.values)
        ways, size = 1 if spec.values_in_keys else 2, max(spec.head_dim, spec.values)
        shape = (num_pages, page_size, spec.num_kv_heads, ways, size)
        pages = allocate_numbers(
            len(specs),
            shape,
            slot_axis=1,
            layout=layout,
            dtype=dtype,
            format=format,
            sharding=resolve(sharding, (None, None, "kv_heads", None, None), shape),
        )
        return cls(pages, group, spec.value_dim)

    @property
    def layout(self) -> Layout:
        """How the layers are stored."""
        return layout_of(self.pages)

    @property
    def shape(self) -> tuple[int, ...]:
        """(P, page_size, g, 2, k) of one layer."""
        pages = self.pages[0] if isinstance(self.pages, tuple) else self.pages
        return pages.shape[-5:]

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        return self.shape[0]

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.shape[1]

    def update(
        self,
        layer: Layer,
        kv: KeysValues | None,
        *,
        mask_info: MaskInfo | None = None,
        ragged: RaggedBatch | None = None,
        group: str = "full",
    ) -> tuple[PagedCache, Pages]:
        """Scatter this step's keys and values into their slots; padding tokens are dropped."""
        if ragged is None:
            raise ValueError("a cache of pages needs ragged, the flat batch of a serving step")
        *_, ways, size = self.shape
        both = keys_values(kv, values_in_keys=ways == 1)[:ways]
        new = jnp.stack(
            [
                jnp.pad(x[0], ((0, 0), (0, 0), (0, size - x.shape[-1])))
                for x in both
                if x is not None
            ],
            axis=2,
        )
        group = ragged.group_of(self.group)
        page, offset = jnp.divmod(ragged.slots[group], self.page_size)

        def put(pages: Numbers, at: At) -> Numbers:
            def scatter(array: jax.Array, tokens: jax.Array, slot_axis: int) -> jax.Array:
                between = (slice(None),) * 3 if slot_axis == array.ndim - 1 else ()  # of scales
                return array.at[(*at, page, *between, offset)].set(tokens, mode="drop")

            return map_slots(scatter, pages, encode(new, pages))

        cache = replace(self, pages=update_layer(self.pages, layer, put))
        return cache, Pages(*locate(cache.pages, layer), group, self.value_dim)
