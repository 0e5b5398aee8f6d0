"""The paged cache of the serving engine: a pool of pages that sequences share.

Legend: P pages, g kv heads, k numbers of a head, n scales of a head, T flat tokens, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Unpack

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo
from jaxtyping import Array, Int

from ed_layers import native
from ed_layers.cache.codes import Numbers, encode_numbers, map_slots
from ed_layers.cache.protocol import NewKeys, keys_values
from ed_layers.cache.protocol import Pages as Pages
from ed_layers.cache.ragged import RaggedBatch
from ed_layers.cache.spec import LayerSpecs, uniform
from ed_layers.cache.storage import (
    At,
    Layer,
    Layout,
    PerLayer,
    Storage,
    StorageOptions,
    get_layout,
    locate,
    update_layer,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedCache:
    """Pages [P, page_size, g, 2, k] per layer, keys and values side by side *inside* a head.

    That order keeps a head's K and V on the same device when heads are sharded, and is a free
    reshape of the `2K` axis that TPU's ragged paged attention requires. Scales of quantized pages
    are [P, g, 2, n, page_size]. Where values are part of their keys, the axis of two has one entry.

    Attributes:
        pages: per layer [P, page_size, g, 2, k]; codes and scales if quantized.
        group: which `slots` and `page_table` of the RaggedBatch these layers use.
        value_dim: width of a value, if it differs from the width of a key; the narrower is padded.
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
        group: str = "full",
        **storage: Unpack[StorageOptions],
    ) -> PagedCache:
        """Allocate an empty pool.

        Args:
            specs: one per layer, all equal.
            num_pages, page_size: pages in the pool, tokens per page.
            group: which `slots` and `page_table` of the RaggedBatch these layers use.
            storage: see `Storage`; `sharding` is of [P, page_size, g, 2, k].
        """
        spec, store = uniform(specs), Storage(**storage)
        if store.format is not None:
            format = store.format.dividing(spec.head_dim, spec.values)
            store = replace(store, format=format)
        ways, size = 1 if spec.values_in_keys else 2, max(spec.head_dim, spec.values)
        shape = (num_pages, page_size, spec.num_kv_heads, ways, size)
        sharding = store.place((None, None, "kv_heads", None, None), shape)
        pages = store.numbers(len(specs), shape, sharding, slot_axis=1)
        return cls(pages, group, spec.value_dim)

    @property
    def layout(self) -> Layout:
        """How the layers are stored."""
        return get_layout(self.pages)

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
        kv: NewKeys | None,
        *,
        mask_info: MaskInfo | None = None,
        ragged: RaggedBatch | None = None,
        group: str = "full",
    ) -> tuple[PagedCache, Pages]:
        """Scatter this step's keys and values into their slots; padding tokens are dropped."""
        if ragged is None:
            raise ValueError("a cache of pages needs ragged, the flat batch of a serving step")
        group = ragged.get_group(self.group)
        cache = self.write(layer, kv, ragged.slots[group])
        return cache, cache.read(layer, group=group)

    def read(self, layer: Layer, *, group: str) -> Pages:
        """Return what attention reads of one layer; `group` names the page table."""
        return Pages(*locate(self.pages, layer), group, self.value_dim)

    def write(self, layer: Layer, kv: NewKeys | None, slots: Int[Array, " T"]) -> PagedCache:
        """Store keys [1, T, g, k] and values [1, T, g, d] of one layer; see `RaggedBatch.slots`."""
        if (
            kv is not None
            and not isinstance(kv, tuple)
            and kv.can_write(locate(self.pages, layer)[0])
        ):
            write = partial(kv.write, slots=slots)
            return replace(self, pages=update_layer(self.pages, layer, write))
        *_, ways, size = self.shape
        kv_arrays = keys_values(kv, values_in_keys=ways == 1)[:ways]
        new = jnp.stack(
            [
                jnp.pad(x[0], ((0, 0), (0, 0), (0, size - x.shape[-1])))
                for x in kv_arrays
                if x is not None
            ],
            axis=2,
        )
        page, offset = jnp.divmod(slots, self.page_size)
        tokens_of_layer = self.num_pages * self.page_size
        real = slots < tokens_of_layer

        def put(pages: Numbers, at: At) -> Numbers:
            def scatter(array: jax.Array, tokens: jax.Array, slot_axis: int) -> jax.Array:
                if native.rows.puts_natively(array):
                    # A token is a row of its page.
                    first = (at[0] if at else 0) * tokens_of_layer
                    rows = jnp.where(real, first + slots, -1)
                    return native.rows.put_native_rows(array, rows, tokens, axes=len(at) + 2)
                between = (slice(None),) * 3 if slot_axis == array.ndim - 1 else ()  # of scales
                return array.at[(*at, page, *between, offset)].set(tokens, mode="drop")

            return map_slots(scatter, pages, encode_numbers(new, pages))

        return replace(self, pages=update_layer(self.pages, layer, put))
