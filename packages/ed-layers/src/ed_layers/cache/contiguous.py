"""Contiguous caches for `generate`: rows of slots.

Tokens are stored, and padding is not: token i of a row is in slot i, or in slot i % w of a ring.
Positions of an encoder keep their indices.

Legend: b batch, g kv heads, t slots, w slots of a ring (the window), k key dim, d value dim, s new
tokens, L layers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Self, Unpack

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo
from jax.core import Tracer
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Int

from ed_layers.cache.codes import Codes, Numbers, encode_numbers, first_numbers, map_slots
from ed_layers.cache.protocol import KeysValues, NewKeys, StoredLayer, keys_values
from ed_layers.cache.ragged import RaggedBatch
from ed_layers.cache.sharded import splits_slots, write_rows
from ed_layers.cache.spec import LayerCacheSpec, LayerSpecs, uniform
from ed_layers.cache.storage import (
    Layer,
    Layout,
    PerLayer,
    Storage,
    StorageOptions,
    get_layout,
    locate,
    take_layer,
    take_rows,
    update_layer,
)

STATIC = {"static": True}


@dataclass(frozen=True)
class CacheRows:
    """Keys and values as [b, g, t, k] per layer: decoding with batch size 1 reads each head
    contiguously.

    Attributes:
        keys, values: per layer [b, g, t, k] and [b, g, t, d]; codes and scales if quantized.
            `values` is None if the keys contain the values.
        segment_ids: 1 for a slot with a token, otherwise 0, [b, t].
        tokens: number of tokens of each row, including the tokens of the current step, [b].
        slots: slots of the tokens of the current step, [b, s]; an index out of range stores
            nothing. None between steps.
        offsets: rotary position of the next token minus `tokens`, [b]; None = 0.
        value_dim: numbers of a value.
        sharding: sharding of one layer's keys if slots are split over devices; otherwise None.
    """

    #: Name of the axis along which slots may be split over devices; None = never.
    SLOTS: ClassVar[str | None] = None

    keys: PerLayer
    values: PerLayer | None
    segment_ids: Int[Array, "b t"]
    tokens: Int[Array, " b"]
    slots: Int[Array, "b s"] | None = None
    offsets: Int[Array, " b"] | None = None
    value_dim: int = field(kw_only=True, metadata=STATIC)
    sharding: NamedSharding | None = field(default=None, metadata=STATIC)

    @classmethod
    def create(
        cls,
        specs: Sequence[LayerSpecs],
        *,
        batch_size: int,
        capacity: int,
        **storage: Unpack[StorageOptions],
    ) -> Self:
        """Allocate an empty cache.

        Args:
            specs: one spec per layer, all equal; `HybridCache` supports different specs.
            batch_size, capacity: number of rows, and maximum number of tokens of a row.
            storage: see `Storage`; `sharding` describes [b, g, t, k].
        """
        spec, store = uniform(specs), Storage(**storage)
        shape = (batch_size, spec.num_kv_heads, cls.slots_for(spec, capacity))
        axes = ("batch", "kv_heads", cls.SLOTS, None)
        sharding = store.place(axes, (*shape, spec.head_dim))
        if store.format is not None:
            format = store.format.dividing(spec.head_dim, spec.values)
            store = replace(store, format=format)

        def make(size: int) -> PerLayer:
            return store.numbers(len(specs), (*shape, size), sharding, slot_axis=2)

        return cls(
            keys=make(spec.head_dim),
            values=None if spec.values_in_keys else make(spec.values),
            segment_ids=jnp.zeros((batch_size, shape[-1]), jnp.int32),
            tokens=jnp.zeros((batch_size,), jnp.int32),
            value_dim=spec.values,
            sharding=splits_slots(sharding),
            **cls.empty(batch_size, shape[-1]),
        )

    @classmethod
    def empty(cls, batch_size: int, num_slots: int) -> dict[str, jax.Array]:
        """Return further fields of a subclass, before the first token."""
        return {}

    @classmethod
    def slots_for(cls, spec: LayerCacheSpec, capacity: int) -> int:
        """Return the number of slots of a row with `capacity` tokens."""
        return capacity

    @property
    def layout(self) -> Layout:
        """Storage layout of the layers."""
        return get_layout(self.keys)

    @property
    def num_slots(self) -> int:
        """Number of slots of a row."""
        return self.segment_ids.shape[1]

    def count(self, segment_ids: Int[Array, "b s"]) -> tuple[Self, Bool[Array, "b s"], jax.Array]:
        """Add the tokens of a step; return the cache, the mask of tokens, and positions [b, s]."""
        real = segment_ids != 0
        positions = compute_positions(self.tokens, real)
        tokens = self.tokens + jnp.count_nonzero(real, axis=1).astype(jnp.int32)
        return replace(self, tokens=tokens), real, positions

    def with_offsets(self, offsets: Int[Array, " b"]) -> Self:
        """Set the offsets of rotary positions; see `ContiguousCache.with_offsets`."""
        return replace(self, offsets=offsets)

    def take(self, slots: Int[Array, "b s"]) -> Self:
        """Record the slots of the tokens of a step."""
        return replace(self, slots=slots, segment_ids=write_slots(self.segment_ids, slots, 1))

    def advance(self, count: int) -> Self:
        """End a step; see `ContiguousCache.advance`."""
        if self.slots is None or self.slots.shape[1] != count:
            begun = "none has begun" if self.slots is None else f"one of {self.slots.shape[1]} has"
            raise ValueError(
                f"advance({count}) ends a step of {count} places, but {begun}: call begin() with "
                "this step's segment_ids, and keep the cache that it returns"
            )
        return replace(self, slots=None)

    def select_rows(self, rows: Int[Array, " n"]) -> Self:
        """Select rows of the cache; see `ContiguousCache.select_rows`."""
        values = None if self.values is None else take_rows(self.values, rows)
        fields = ("segment_ids", "tokens", *self.empty(0, 0))
        by_row = {name: getattr(self, name)[rows] for name in fields}
        by_row["offsets"] = None if self.offsets is None else self.offsets[rows]
        return replace(self, keys=take_rows(self.keys, rows), values=values, **by_row)

    def update(
        self,
        layer: Layer,
        kv: NewKeys | None,
        *,
        mask_info: MaskInfo | None = None,
        ragged: RaggedBatch | None = None,
        group: str = "full",
    ) -> tuple[Self, StoredLayer]:
        """Store the keys and values of one layer; see `Cache.update`."""
        if mask_info is None:
            raise ValueError("a cache of rows needs mask_info, which its begin() returns")
        return self.store(layer, kv, mask_info)

    @abstractmethod
    def store(self, layer: Layer, kv: NewKeys | None, mask: MaskInfo) -> tuple[Self, StoredLayer]:
        """Store the keys and values of one layer; `update` calls this method."""

    def write(self, layer: Layer, kv: KeysValues, slots: Int[Array, "b s"]) -> Self:
        """Store keys [b, s, g, k] and values [b, s, g, d] of one layer in these slots."""

        def write_layer(storage: PerLayer, new: jax.Array) -> PerLayer:
            write = partial(write_rows, new=new, slots=slots, sharding=self.sharding)
            return update_layer(storage, layer, write)

        keys = write_layer(self.keys, kv[0])
        if self.values is None or kv[1] is None:
            return replace(self, keys=keys)
        return replace(self, keys=keys, values=write_layer(self.values, kv[1]))

    def read(self, layer: Layer, mask_info: MaskInfo, *, ordered: bool = False) -> StoredLayer:
        """Return one layer as attention reads it."""
        keys, at = locate(self.keys, layer)
        if self.values is None:
            # Slice one layer, not the stack of all layers.
            keys, at = take_layer(keys, at), ()
            values = first_numbers(keys, self.value_dim)
        else:
            values, _ = locate(self.values, layer)
        return StoredLayer(keys, values, at, mask_info, self.layout, ordered, self.sharding)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenseCache(CacheRows):
    """All tokens of each row: token i is in slot i."""

    SLOTS: ClassVar[str | None] = "key_sequence"

    @property
    def capacity(self) -> int:
        """Maximum number of tokens of a row."""
        return self.num_slots

    @property
    def can_rewind(self) -> bool:
        """Whether rows can drop their latest tokens: always, because no slot is overwritten."""
        return True

    def rewind(self, tokens: Int[Array, " b"]) -> DenseCache:
        """Keep the first `tokens` of each row; see `ContiguousCache.rewind`."""
        slot_mask = jnp.arange(self.num_slots) < tokens[:, None]
        return replace(self, tokens=tokens, segment_ids=jnp.where(slot_mask, self.segment_ids, 0))

    def begin(
        self, segment_ids: Int[Array, "b s"]
    ) -> tuple[DenseCache, MaskInfo, Int[Array, "b s"]]:
        """Start a step; see `ContiguousCache.begin`. The mask covers all slots."""
        cache, real, positions = self.count(segment_ids)
        cache = cache.take(jnp.where(real, positions, -1))
        b, most = segment_ids.shape
        if not isinstance(cache.tokens, Tracer) and cache.tokens.is_fully_addressable:
            most = int(jnp.max(cache.tokens))
        if most > self.capacity:
            raise ValueError(
                f"a row gets {most} tokens in a cache for {self.capacity}; create the cache with "
                f"room for them: init_cache(batch_size, max_length={most} or more)"
            )
        slot = jnp.broadcast_to(jnp.arange(self.capacity, dtype=jnp.int32), (b, self.capacity))
        mask_info = MaskInfo(
            q_segment_ids=real.astype(jnp.int32),
            kv_segment_ids=cache.segment_ids,
            # A token past the end sees the last slot, regardless of its window; see `store`.
            q_index=jnp.minimum(positions, self.capacity - 1),
            kv_index=slot,
        )
        return cache, mask_info, add_offsets(positions, self.offsets)

    def store(self, layer: Layer, kv: NewKeys | None, mask: MaskInfo) -> tuple[Self, StoredLayer]:
        """Store the keys and values of one layer after the previous tokens; return all slots.

        A row with more tokens than slots stores NaN in its last slot, which every later query of
        the row sees. This turns an error that is only visible at run time into a visible result.
        """
        keys, values = keys_values(kv, values_in_keys=self.values is None)
        slots, last = self.slots, self.capacity - 1
        if slots is None:  # Without `begin`, every position is a token.
            slots = self.tokens[:, None] + jnp.arange(keys.shape[1], dtype=jnp.int32)
        past = (jnp.max(slots, axis=1, keepdims=True) > last) & (slots >= last)
        keys = jnp.where(past[:, :, None, None], jnp.nan, keys)
        if values is not None:
            values = jnp.where(past[:, :, None, None], jnp.nan, values)
        cache = self.write(layer, (keys, values), jnp.minimum(slots, last))
        return cache, cache.read(layer, mask, ordered=mask.causal)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WindowCache(CacheRows):
    """The last `w` tokens of each row, for layers with a window: token i is in slot i % w.

    Attributes:
        index: order index of the token in each slot, [b, w].
    """

    index: Int[Array, "b w"] = field(kw_only=True)

    @classmethod
    def slots_for(cls, spec: LayerCacheSpec, capacity: int) -> int:
        """Return the length of the window."""
        if spec.window is None or spec.window > capacity:
            raise ValueError(
                f"WindowCache is for layers whose window is shorter than the {capacity} tokens of "
                f"a row, but got {spec}; DenseCache keeps all tokens"
            )
        return spec.window

    @classmethod
    def empty(cls, batch_size: int, num_slots: int) -> dict[str, jax.Array]:
        """Return indices of empty slots."""
        return {"index": jnp.zeros((batch_size, num_slots), jnp.int32)}

    @property
    def capacity(self) -> None:
        """The number of tokens of a row is unlimited."""
        return None

    @property
    def can_rewind(self) -> bool:
        """Whether rows can drop their latest tokens: no, because those overwrote earlier tokens."""
        return False

    def rewind(self, tokens: Int[Array, " b"]) -> WindowCache:
        """Raise ValueError; see `can_rewind`."""
        raise ValueError("a ring of slots cannot drop its last tokens: they overwrote older ones")

    def begin(
        self, segment_ids: Int[Array, "b s"]
    ) -> tuple[WindowCache, MaskInfo, Int[Array, "b s"]]:
        """Start a step; see `ContiguousCache.begin`.

        The mask covers the arrays that `update` returns. For a single token, this is the ring with
        the new token in its slot. For several tokens, this is the ring before the step, followed by
        the new tokens.
        """
        cache, real, positions = self.count(segment_ids)
        token_mask = real & (positions >= cache.tokens[:, None] - self.num_slots)
        slots = jnp.where(token_mask, positions % self.num_slots, -1)
        cache = replace(cache.take(slots), index=write_slots(self.index, slots, positions))
        segments = real.astype(jnp.int32)
        kv = cache.segment_ids, cache.index
        if segments.shape[1] > 1:
            kv = (
                jnp.concatenate([self.segment_ids, segments], axis=1),
                jnp.concatenate([self.index, positions], axis=1),
            )
        mask_info = MaskInfo(segments, kv[0], positions, kv[1])
        return cache, mask_info, add_offsets(positions, self.offsets)

    def store(self, layer: Layer, kv: NewKeys | None, mask: MaskInfo) -> tuple[Self, StoredLayer]:
        """Store the keys and values of this step; return those that its queries see."""
        kv = keys_values(kv, values_in_keys=self.values is None)
        if self.slots is None:
            raise ValueError(
                "begin() of a WindowCache receives the tokens of a step: call begin() before the "
                "layers, once per step"
            )
        cache = self.write(layer, kv, self.slots)
        if self.slots.shape[1] == 1:
            return cache, cache.read(layer, mask)
        # New tokens may overwrite tokens that the first new tokens still see: attention reads both.
        previous_layer = self.read(layer, mask)
        keys = behind(previous_layer.k, kv[0])
        if kv[1] is None or self.values is None:
            values = first_numbers(keys, self.value_dim)
        else:
            values = behind(previous_layer.v, kv[1])
        return cache, StoredLayer(keys, values, (), mask, self.layout)


def compute_positions(
    num_previous: Int[Array, " b"], real: Bool[Array, "b s"]
) -> Int[Array, "b s"]:
    """Return the positions of new tokens after `before` previous tokens; padding is not counted."""
    count = jnp.cumsum(real, axis=1, dtype=jnp.int32)
    return jnp.maximum(num_previous[:, None] + count - 1, 0)


def add_offsets(
    positions: Int[Array, "b s"], offsets: Int[Array, " b"] | None
) -> Int[Array, "b s"]:
    """Return rotary positions: numbers of tokens plus the offsets of their rows."""
    return positions if offsets is None else positions + offsets[:, None]


def write_slots(
    array: Int[Array, "b t"], slots: Int[Array, "b s"], values: Int[Array, "b s"] | int
) -> Int[Array, "b t"]:
    """Write values into these slots of the array; ignore slots out of range, including negative
    ones."""
    rows = jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None]
    return array.at[rows, jnp.where(slots < 0, array.shape[1], slots)].set(values, mode="drop")


def behind(old: Numbers, new: jax.Array) -> Numbers:
    """Concatenate stored numbers [b, g, t, k] of a layer and new numbers [b, s, g, k]."""
    tokens = encode_numbers(new, old)
    if isinstance(tokens, Codes):
        scale = jnp.moveaxis(tokens.scale, 1, -1)
        tokens = Codes(jnp.swapaxes(tokens.values, 1, 2), scale)
    else:
        tokens = jnp.swapaxes(tokens, 1, 2)
    return map_slots(lambda a, b, axis: jnp.concatenate([a, b], axis), old, tokens)
