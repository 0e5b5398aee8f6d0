"""A differentiable cache of rows and of chains, which continue a row after some of its positions.

A draft of several tokens is a chain: its first state belongs to a position of the row, and each
further state reads the states of its own chain and the row up to the chain's start. A training step
computes all chains of a row together, one link of each chain at a time:

    link 0    positions 0 ... s - 1 of the row, causal
    link j    position start + j of each chain; reads the row up to `start`, and links 1 to j of the
              same chain

An engine that drafts after `start` reads the same keys. The keys of link 0 exist once, so memory is
linear in the length of the row and in the number of chains.

Legend: b rows, s positions, n chains, t keys, g kv heads, k head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from dataclasses import fields as fields_of
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
from ed_infra.masks import Limit, MaskInfo
from jaxtyping import Array, Bool, Int

from ed_layers.cache.protocol import KeysValues, NewKeys, StoredLayer, keys_values
from ed_layers.cache.ragged import RaggedBatch
from ed_layers.cache.spec import LayerSpecs, uniform
from ed_layers.cache.storage import Layer, Layout, static_layer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChainMask(MaskInfo):
    """The mask of one link of all chains; only `get_mask` knows it.

    Attributes:
        starts: index of the last position of the row that a query attends to, [b, n].
        q_chains: number of the chain of each query, from 1, [b, n].
        kv_chains: number of the chain of each key, 0 for a key of the row, [b, t].
    """

    needs_matrix: ClassVar[bool] = True

    starts: Int[Array, "b n"] = field(kw_only=True)
    q_chains: Int[Array, "b n"] = field(kw_only=True)
    kv_chains: Int[Array, "b t"] = field(kw_only=True)

    def get_mask(self, window: Limit = None, chunk: Limit = None) -> Bool[jax.Array, "b n t"]:
        """See `MaskInfo.get_mask`."""
        chains = self.kv_chains[:, None]
        is_seen_row = (chains == 0) & (self.kv_index[:, None] <= self.starts[:, :, None])
        is_visible = is_seen_row | (chains == self.q_chains[:, :, None])
        return super().get_mask(window, chunk) & is_visible


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChainCache:
    """The keys and values of a row, and of the links of its chains; see above.

    The first call of a model computes the row. `start_chains` sets the chains, and each further
    call computes a link of all chains.

    Attributes:
        keys, values: layer -> arrays [b, t, g, k] of the links; values are None if the keys contain
            them.
        row: segments of the row [b, s].
        mask: mask of the current link; None between calls.
        segments, starts: segment of each chain [b, n], 0 = none, and the index of its first
            position; None before `start_chains`.
        links: number of computed links of the chains.
        value_dim: numbers of a value, if the keys contain the values.
        trains: whether calls with the cache are parts of a training step, as with no other cache.
    """

    trains: ClassVar[bool] = True

    keys: dict[int, tuple[jax.Array, ...]] = field(default_factory=dict)
    values: dict[int, tuple[jax.Array | None, ...]] = field(default_factory=dict)
    row: MaskInfo | None = None
    mask: MaskInfo | None = None
    segments: Int[Array, "b n"] | None = None
    starts: Int[Array, "b n"] | None = None
    links: int = field(default=0, metadata={"static": True})
    value_dim: int | None = field(default=None, metadata={"static": True})

    @classmethod
    def create(cls, specs: Sequence[LayerSpecs]) -> ChainCache:
        """Create an empty cache.

        Args:
            specs: one spec per layer, all equal and without windows.
        """
        return cls(value_dim=uniform(specs).values)

    @property
    def layout(self) -> Layout:
        """Storage layout of the layers."""
        return "leaves"

    def start_chains(self, places: Int[Array, "b n"]) -> Self:
        """Return the cache for chains that start at these positions of the row."""
        assert self.row is not None, "the first call computes the row"
        segments, starts = (
            jnp.take_along_axis(x, places, axis=1)
            for x in (self.row.q_segment_ids, self.row.q_index)
        )
        return replace(self, segments=segments, starts=starts)

    def begin(
        self, segment_ids: Int[Array, "b s"]
    ) -> tuple[ChainCache, MaskInfo, Int[Array, "b s"]]:
        """Start a call; see `ContiguousCache.begin`.

        Args:
            segment_ids: segments of the row; for a link, 0 = the chain has no such link.
        """
        if self.row is None or self.starts is None or self.segments is None:
            row = MaskInfo.from_segments(segment_ids)
            return replace(self, row=row, mask=row), row, row.q_index
        b, n = self.starts.shape
        links = self.links + 1
        numbers = jnp.broadcast_to(jnp.arange(1, n + 1, dtype=jnp.int32), (b, n))
        index = self.starts + links

        def join(first: jax.Array, *parts: jax.Array) -> jax.Array:
            return jnp.concatenate([first, *parts], axis=1)

        mask = ChainMask(
            q_segment_ids=jnp.where(segment_ids != 0, self.segments, 0),
            kv_segment_ids=join(self.row.kv_segment_ids, *[self.segments] * links),
            q_index=index,
            kv_index=join(self.row.kv_index, *(self.starts + j for j in range(1, links + 1))),
            starts=self.starts,
            q_chains=numbers,
            kv_chains=join(jnp.zeros_like(self.row.kv_index), *[numbers] * links),
        )
        return replace(self, mask=mask, links=links), mask, index

    def advance(self, count: int) -> Self:
        """End a call; see `ContiguousCache.advance`."""
        return replace(self, mask=None)

    def update(
        self,
        layer: Layer,
        kv: NewKeys | None,
        *,
        mask_info: MaskInfo | None = None,
        ragged: RaggedBatch | None = None,
        group: str = "full",
    ) -> tuple[Self, StoredLayer | None]:
        """Store the keys and values of one layer; see `Cache.update`.

        Returns:
            the cache, and all keys; None for the row, whose queries attend to the keys of the call.
        """
        number = static_layer(layer)
        new: KeysValues = keys_values(kv, values_in_keys=True)
        keys = {**self.keys, number: (*self.keys.get(number, ()), new[0])}
        values = {**self.values, number: (*self.values.get(number, ()), new[1])}
        cache = replace(self, keys=keys, values=values)
        if self.starts is None and new[1] is not None:
            return cache, None
        return cache, cache.read(number)

    def read(self, layer: int) -> StoredLayer:
        """Return one layer as attention reads it."""
        mask = self.mask
        assert mask is not None, "a call has begun"
        if self.starts is None:  # keys of a row that contain their values
            nobody = jnp.zeros_like(mask.q_index)
            fields = {f.name: getattr(mask, f.name) for f in fields_of(mask)}
            mask = ChainMask(**fields, starts=mask.q_index, q_chains=nobody - 1, kv_chains=nobody)
        keys = jnp.concatenate(self.keys[layer], axis=1).swapaxes(1, 2)
        parts = [value for value in self.values[layer] if value is not None]
        if parts:
            values = jnp.concatenate(parts, axis=1).swapaxes(1, 2)
        else:
            values = keys[..., : self.value_dim]
        return StoredLayer(keys, values, (), mask, self.layout)
