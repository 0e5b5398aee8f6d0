"""The contiguous cache of `generate`: every row has the same capacity.

Legend: b batch, g kv heads, t capacity, k key dim, d value dim, s new tokens, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from ed_layers.cache.codes import Format, Numbers, encode
from ed_layers.cache.protocol import Stored, keys_values
from ed_layers.cache.ragged import RaggedBatch
from ed_layers.cache.sharded import splits_slots, write_split_slots
from ed_layers.cache.spec import LayerSpecs, uniform
from ed_layers.cache.storage import (
    Layer,
    Layout,
    PerLayer,
    allocate_slots,
    layout_of,
    locate,
    write_slots,
)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "segment_ids", "length"],
    meta_fields=["sharding"],
)
@dataclass(frozen=True)
class DenseCache:
    """Keys and values as [b, g, t, k] per layer: a batch-1 decode reads each head contiguously.

    Attributes:
        keys, values: per layer [b, g, t, k] and [b, g, t, d]; codes and scales if quantized.
        segment_ids: which slots hold a token, [b, t]; 0 = empty or padding.
        length: slots written so far, the same for every row (rows are left-padded).
        sharding: of one layer's keys where slots are split over devices; None = they are not.
    """

    keys: PerLayer
    values: PerLayer
    segment_ids: Int[Array, "b t"]
    length: Int[Array, ""]
    sharding: NamedSharding | None = None

    @classmethod
    def create(
        cls,
        specs: Sequence[LayerSpecs],
        *,
        batch_size: int,
        capacity: int,
        dtype: jnp.dtype = jnp.float32,
        layout: Layout = "stacked",
        sharding: jax.sharding.Sharding | None = None,
        format: Format | None = None,
    ) -> DenseCache:
        """Allocate an empty cache.

        Args:
            specs: one per layer, all equal (see HybridCache for those that differ).
            batch_size, capacity: rows, and slots per row.
            dtype: of what is stored, unless it is quantized.
            layout: "stacked" for a scanned model, "leaves" for an unrolled one.
            sharding: of one layer's [b, g, t, k]; None leaves placement to jax.
            format: of 8-bit storage; None stores `dtype`.
        """
        spec = uniform(specs)
        keys, values = (
            allocate_slots(
                len(specs),
                (batch_size, spec.num_kv_heads, capacity, size),
                layout=layout,
                dtype=dtype,
                format=format,
                sharding=sharding,
            )
            for size in (spec.head_dim, spec.values)
        )
        return cls(
            keys=keys,
            values=values,
            segment_ids=jnp.zeros((batch_size, capacity), jnp.int32),
            length=jnp.zeros((), jnp.int32),
            sharding=splits_slots(sharding),
        )

    @property
    def layout(self) -> Layout:
        """How the layers are stored."""
        return layout_of(self.keys)

    @property
    def capacity(self) -> int:
        """Slots per row."""
        return self.segment_ids.shape[1]

    def begin(
        self, segment_ids: Int[Array, "b s"]
    ) -> tuple[DenseCache, MaskInfo, Int[Array, "b s"]]:
        """Announce `s` new tokens: what they may attend to, and their rotary positions.

        Args:
            segment_ids: 1 for a token, 0 for padding.

        Returns:
            the cache that knows the new slots, the mask over all slots, and positions that count
            tokens, not padding.
        """
        b, s = segment_ids.shape
        before = jnp.count_nonzero(self.segment_ids, axis=1).astype(jnp.int32)
        kv_segments = jax.lax.dynamic_update_slice(
            self.segment_ids, segment_ids.astype(jnp.int32), (0, self.length)
        )
        q_index = jnp.broadcast_to(self.length + jnp.arange(s, dtype=jnp.int32), (b, s))
        kv_index = jnp.broadcast_to(jnp.arange(self.capacity, dtype=jnp.int32), (b, self.capacity))
        mask_info = MaskInfo(
            q_segment_ids=segment_ids.astype(jnp.int32),
            kv_segment_ids=kv_segments,
            q_index=q_index,
            kv_index=kv_index,
            causal=True,
        )
        return replace(self, segment_ids=kv_segments), mask_info, counted(before, segment_ids)

    def update(
        self,
        layer: Layer,
        kv: tuple[Float[Array, "b s g k"], Float[Array, "b s g d"]] | None,
        *,
        mask_info: MaskInfo,
        ragged: RaggedBatch | None = None,
        group: str = "full",
    ) -> tuple[DenseCache, Stored]:
        """Store this step's keys and values of one layer behind what is there; give all."""
        keys, values = (
            self.put(storage, layer, to_slots(new, storage))
            for storage, new in zip((self.keys, self.values), keys_values(kv), strict=True)
        )
        (k, at), (v, _) = locate(keys, layer), locate(values, layer)
        stored = Stored(
            k, v, at, mask_info, self.layout, ordered=mask_info.causal, sharding=self.sharding
        )
        return replace(self, keys=keys, values=values), stored

    def put(self, storage: PerLayer, layer: Layer, new: Numbers) -> PerLayer:
        """Write new slots of one layer behind what is there."""
        if self.sharding is None:
            return write_slots(storage, layer, new, self.length)
        return write_split_slots(storage, layer, new, self.length, self.sharding)

    def advance(self, count: int) -> DenseCache:
        """Move the write position after every layer has written its `count` tokens."""
        return replace(self, length=self.length + count)


def to_slots(new: Float[Array, "b s g k"], storage: PerLayer) -> Numbers:
    """New keys or values as [b, g, s, k], in the format of the storage that they go to."""
    like = storage[0] if isinstance(storage, tuple) else storage
    return encode(jnp.swapaxes(new, 1, 2), like)


def counted(before: Int[Array, " b"], segment_ids: Int[Array, "b s"]) -> Int[Array, "b s"]:
    """Positions of new tokens behind `before` others; padding is not counted."""
    count = jnp.cumsum(segment_ids != 0, axis=1, dtype=jnp.int32)
    return jnp.maximum(before[:, None] + count - 1, 0)
