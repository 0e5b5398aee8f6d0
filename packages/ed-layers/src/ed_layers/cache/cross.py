"""Keys and values of an encoder, which cross-attention reads: `CrossCache` has one row for each row
of a batch, `CrossSlots` one slot for each sequence of a serving engine.

Legend: n slots, t encoder positions, g kv heads, k key dim, d value dim, T flat tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, Unpack

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo
from jaxtyping import Array, Int

from ed_layers.cache.contiguous import CacheRows, write_slots
from ed_layers.cache.paged import PagedCache
from ed_layers.cache.protocol import KeysValues, NewKeys, Pages, StoredLayer, keys_values
from ed_layers.cache.ragged import RaggedBatch
from ed_layers.cache.spec import LayerSpecs
from ed_layers.cache.storage import Layer, Layout, StorageOptions


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CrossCache(CacheRows):
    """Keys and values of an encoder, written once and then read."""

    def store(self, layer: Layer, kv: NewKeys | None, mask: MaskInfo) -> tuple[Self, StoredLayer]:
        """Write the keys and values of an encoder, if there are any, and return the stored ones.

        Args:
            layer: number of the layer.
            kv: keys and values of at most `num_slots` positions; None reads earlier ones.
            mask: segments of the queries; with `kv` also of the encoder. The order plays no part.
        """
        cache = self
        if kv is not None:
            kv = keys_values(kv, values_in_keys=self.values is None)
            if kv[0].shape[1] > self.num_slots:
                raise ValueError(
                    f"an encoder's {kv[0].shape[1]} positions do not fit into a cache for "
                    f"{self.num_slots}; create it with room for them"
                )
            real = (mask.kv_segment_ids != 0).astype(jnp.int32)
            slots = jnp.broadcast_to(jnp.arange(real.shape[1], dtype=jnp.int32), real.shape)
            stored_segments = write_slots(jnp.zeros_like(self.segment_ids), slots, real)
            cache = replace(self, segment_ids=stored_segments).write(layer, kv, slots)
        stored_segments = cache.segment_ids
        queries = (mask.q_segment_ids != 0).astype(jnp.int32)
        mask = MaskInfo(
            queries, stored_segments, mask.q_index, jnp.zeros_like(stored_segments), causal=False
        )
        return cache, cache.read(layer, mask)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CrossSlots:
    """Keys and values of encoders, one slot for each sequence that an engine serves.

    A slot consists of consecutive pages, so every kernel for pages computes cross-attention: each
    query is treated as a sequence of one token whose context is the encoder output of its slot. A
    sequence uses the slot `RaggedBatch.state_slots`.

    Attributes:
        pool: the pages of all slots.
        lengths: encoder positions of each slot, [n]; 0 = empty.
    """

    pool: PagedCache
    lengths: Int[Array, " n"]

    @classmethod
    def create(
        cls,
        specs: Sequence[LayerSpecs],
        *,
        num_slots: int,
        capacity: int,
        page_size: int,
        **storage: Unpack[StorageOptions],
    ) -> CrossSlots:
        """Allocate empty slots.

        Args:
            specs: one spec per layer, all equal.
            num_slots, capacity: number of slots, and maximum number of encoder positions of a slot.
            page_size: positions per page.
            storage: see `Storage`; `sharding` describes [P, page_size, g, 2, k].
        """
        pages = num_slots * -(-capacity // page_size)
        pool = PagedCache.create(
            specs, num_pages=pages, page_size=page_size, group="cross", **storage
        )
        return cls(pool, jnp.zeros((num_slots,), jnp.int32))

    @property
    def layout(self) -> Layout:
        """Storage layout of the layers."""
        return self.pool.layout

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return self.lengths.shape[0]

    @property
    def pages_per_slot(self) -> int:
        """Number of consecutive pages of a slot."""
        return self.pool.num_pages // self.num_slots

    @property
    def capacity(self) -> int:
        """Maximum number of encoder positions of a slot."""
        return self.pages_per_slot * self.pool.page_size

    def write(
        self,
        layer: Layer,
        kv: KeysValues,
        slot: int | Int[Array, ""],
        segment_ids: Int[Array, "1 t"],
    ) -> CrossSlots:
        """Replace the content of a slot in one layer.

        Args:
            layer: number of the layer.
            kv: keys [1, t, g, k] and values [1, t, g, d] of one encoder output.
            slot: number of the slot.
            segment_ids: 0 for padding, which is not stored.

        Raises:
            ValueError: the encoder output has more positions than a slot.
        """
        if kv[0].shape[:2] != segment_ids.shape or segment_ids.shape[0] != 1:
            raise ValueError(
                f"keys are {list(kv[0].shape)} and segment_ids {list(segment_ids.shape)}: a slot "
                "stores the encoder output of one sequence, [1, t]"
            )
        if segment_ids.shape[1] > self.capacity:
            raise ValueError(
                f"the encoder output has {segment_ids.shape[1]} positions, but a slot has room for "
                f"{self.capacity}; create the cache with a larger cross_capacity"
            )
        real = segment_ids[0] != 0
        place = jnp.cumsum(real, dtype=jnp.int32) - 1
        invalid_slot = self.pool.num_pages * self.pool.page_size
        places = jnp.where(real, slot * self.capacity + place, invalid_slot)
        lengths = self.lengths.at[slot].set(jnp.count_nonzero(real).astype(jnp.int32))
        return replace(self, pool=self.pool.write(layer, kv, places), lengths=lengths)

    def update(
        self,
        layer: Layer,
        kv: NewKeys | None,
        *,
        mask_info: MaskInfo | None = None,
        ragged: RaggedBatch | None = None,
        group: str = "cross",
    ) -> tuple[CrossSlots, Pages]:
        """Return the arrays that the queries of a serving step read; `write` fills the slots."""
        if ragged is None:
            raise ValueError("slots of a serving engine need ragged, the flat batch of a step")
        if kv is not None:
            raise ValueError("write() stores encoder outputs; a serving step only reads them")
        pages = self.pool.read(layer, group="cross")
        return self, replace(pages, ragged=self.tokens_as_sequences(ragged))

    def tokens_as_sequences(self, ragged: RaggedBatch) -> RaggedBatch:
        """Return a batch in which each token is a sequence, with the encoder output as context."""
        tokens, sequences = ragged.seq_of_token.shape[0], ragged.state_slots.shape[0]
        slot = ragged.state_slots[jnp.clip(ragged.seq_of_token, 0, sequences - 1)]
        count, numbers = ragged.cu_q_lens[-1], jnp.arange(tokens + 1, dtype=jnp.int32)
        pages = slot[:, None] * self.pages_per_slot + jnp.arange(self.pages_per_slot)
        return RaggedBatch(
            cu_q_lens=jnp.minimum(numbers, count).astype(jnp.int32),
            kv_lens=jnp.where(ragged.real(), self.lengths[slot], 0),
            seq_of_token=numbers[:-1],
            slots={},
            page_table={"cross": pages.astype(jnp.int32)},
            state_slots=slot,
            num_seqs=count,
            decode_only=True,
        )
