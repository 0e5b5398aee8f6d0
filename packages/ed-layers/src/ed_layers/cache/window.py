"""The cache of sliding-window layers: a ring of as many slots as the window is long.

Legend: b batch, g kv heads, w slots (the window), k key dim, d value dim, s new tokens, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo
from jaxtyping import Array, Float, Int

from ed_layers.cache.codes import Format, Numbers, map_slots
from ed_layers.cache.dense import counted, to_slots
from ed_layers.cache.protocol import Stored, keys_values
from ed_layers.cache.ragged import RaggedBatch
from ed_layers.cache.spec import LayerSpecs, uniform
from ed_layers.cache.storage import (
    Layer,
    Layout,
    PerLayer,
    allocate_slots,
    layer_of,
    layout_of,
    locate,
    write_slots,
)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "segment_ids", "index", "tokens", "length"],
    meta_fields=[],
)
@dataclass(frozen=True)
class WindowCache:
    """Keys and values of the last `w` slots; slot number p of a row is at `p % w`.

    Attributes:
        keys, values: per layer [b, g, w, k] and [b, g, w, d]; codes and scales if quantized.
        segment_ids: which places hold a token, [b, w]; 0 = empty or padding.
        index: order index of what is at each place, [b, w].
        tokens: tokens of each row so far, [b].
        length: slots written so far, those that are overwritten too.
    """

    keys: PerLayer
    values: PerLayer
    segment_ids: Int[Array, "b w"]
    index: Int[Array, "b w"]
    tokens: Int[Array, " b"]
    length: Int[Array, ""]

    @classmethod
    def create(
        cls,
        specs: Sequence[LayerSpecs],
        *,
        batch_size: int,
        capacity: int | None = None,
        dtype: jnp.dtype = jnp.float32,
        layout: Layout = "stacked",
        sharding: jax.sharding.Sharding | None = None,
        format: Format | None = None,
    ) -> WindowCache:
        """Allocate an empty cache.

        Args:
            specs: one per layer, all equal, with a window.
            capacity: slots that a row will ever have; there are no more places than that.
            batch_size, dtype, layout, sharding, format: see `DenseCache.create`; a ring is not
                split over devices along its slots.
        """
        spec = uniform(specs)
        if spec.window is None:
            raise ValueError(f"WindowCache keeps layers with a window, but got {spec}")
        places = spec.window if capacity is None else min(spec.window, capacity)
        keys, values = (
            allocate_slots(
                len(specs),
                (batch_size, spec.num_kv_heads, places, size),
                layout=layout,
                dtype=dtype,
                format=format,
                sharding=sharding,
            )
            for size in (spec.head_dim, spec.values)
        )
        empty = jnp.zeros((batch_size, places), jnp.int32)
        return cls(
            keys=keys,
            values=values,
            segment_ids=empty,
            index=empty,
            tokens=jnp.zeros((batch_size,), jnp.int32),
            length=jnp.zeros((), jnp.int32),
        )

    @property
    def layout(self) -> Layout:
        """How the layers are stored."""
        return layout_of(self.keys)

    @property
    def places(self) -> int:
        """Slots that are kept."""
        return self.index.shape[1]

    def begin(
        self, segment_ids: Int[Array, "b s"]
    ) -> tuple[WindowCache, MaskInfo, Int[Array, "b s"]]:
        """Announce `s` new tokens; see `DenseCache.begin`.

        The mask is over what `update` gives: the places, in which a single token has taken its own;
        or, of several, the places as they were and then the new tokens.
        """
        b, s = segment_ids.shape
        segments = segment_ids.astype(jnp.int32)
        q_index = jnp.broadcast_to(self.length + jnp.arange(s, dtype=jnp.int32), (b, s))
        after = self.newest(s)
        seen = [
            jnp.concatenate(x, 1) for x in ((self.segment_ids, segments), (self.index, q_index))
        ]
        kv_segments, kv_index = kept = [x[:, after] for x in seen]
        if s > 1:
            kv_segments, kv_index = seen
        mask_info = MaskInfo(segments, kv_segments, q_index, kv_index, causal=True)
        cache = replace(
            self,
            segment_ids=kept[0],
            index=kept[1],
            tokens=self.tokens + jnp.count_nonzero(segments, axis=1).astype(jnp.int32),
        )
        return cache, mask_info, counted(self.tokens, segments)

    def newest(self, s: int) -> Int[Array, " w"]:
        """What each place holds after `s` new tokens: where that is in places + new tokens."""
        place = jnp.arange(self.places, dtype=jnp.int32)
        last = self.length + s - 1
        slot = last - (last - place) % self.places
        return jnp.where(slot >= self.length, self.places + slot - self.length, place)

    def update(
        self,
        layer: Layer,
        kv: tuple[Float[Array, "b s g k"], Float[Array, "b s g d"]] | None,
        *,
        mask_info: MaskInfo,
        ragged: RaggedBatch | None = None,
        group: str = "window",
    ) -> tuple[WindowCache, Stored]:
        """Store this step's keys and values of one layer; give what its queries may see.

        Args:
            mask_info: as this cache's `begin` gave it.
        """
        storages = self.keys, self.values
        new = [to_slots(x, at) for x, at in zip(keys_values(kv), storages, strict=True)]
        if kv is not None and kv[0].shape[1] == 1:
            place = self.length % self.places
            keys, values = (
                write_slots(storage, layer, x, place)
                for storage, x in zip(storages, new, strict=True)
            )
            (k, at), (v, _) = locate(keys, layer), locate(values, layer)
            stored = Stored(k, v, at, mask_info, self.layout)
            return replace(self, keys=keys, values=values), stored
        # New tokens may push out what their own first ones still see: attention reads both.
        seen = [join(layer_of(at, layer), x) for at, x in zip(storages, new, strict=True)]
        after = self.newest(mask_info.q_index.shape[1])
        keys, values = (
            write_slots(storage, layer, pick(x, after), 0)
            for storage, x in zip(storages, seen, strict=True)
        )
        stored = Stored(seen[0], seen[1], (), mask_info, self.layout)
        return replace(self, keys=keys, values=values), stored

    def advance(self, count: int) -> WindowCache:
        """Move the write position after every layer has written its `count` tokens."""
        return replace(self, length=self.length + count)


def join(old: Numbers, new: Numbers) -> Numbers:
    """Old slots and then new ones."""
    return map_slots(lambda a, b, axis: jnp.concatenate([a, b], axis), old, new)


def pick(numbers: Numbers, slots: Int[Array, " w"]) -> Numbers:
    """These slots."""
    return map_slots(lambda array, axis: jnp.take(array, slots, axis=axis), numbers)
