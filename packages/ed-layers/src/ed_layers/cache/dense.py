"""The contiguous cache of `generate`: every row has the same capacity.

Legend: b batch, g kv heads, t capacity, k head dim, s new tokens, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo
from jaxtyping import Array, Float, Int

from ed_layers.cache.protocol import (
    Layer,
    LayerCacheSpec,
    Layout,
    PerLayer,
    Stored,
    allocate,
    layer_of,
    update_layer,
)
from ed_layers.cache.ragged import RaggedBatch


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "segment_ids", "length"],
    meta_fields=[],
)
@dataclass(frozen=True)
class DenseCache:
    """Keys and values as [b, g, t, k] per layer: a batch-1 decode reads each head contiguously.

    Attributes:
        keys, values: per layer [b, g, t, k].
        segment_ids: which slots hold a token, [b, t]; 0 = empty or padding.
        length: slots written so far, the same for every row (rows are left-padded).
    """

    keys: PerLayer
    values: PerLayer
    segment_ids: Int[Array, "b t"]
    length: Int[Array, ""]

    @classmethod
    def create(
        cls,
        specs: Sequence[LayerCacheSpec],
        *,
        batch_size: int,
        capacity: int,
        dtype: jnp.dtype = jnp.float32,
        layout: Layout = "stacked",
        sharding: jax.sharding.Sharding | None = None,
    ) -> DenseCache:
        """Allocate an empty cache.

        Args:
            specs: one per layer, all equal (mixed heads need a cache of their own kind).
            batch_size, capacity: rows, and slots per row.
            layout: "stacked" for a scanned model, "leaves" for an unrolled one.
            sharding: of one layer's [b, g, t, k]; None leaves placement to jax.
        """
        spec = uniform(specs)
        shape = (batch_size, spec.num_kv_heads, capacity, spec.head_dim)

        def make(lead: tuple[int, ...]) -> jax.Array:
            return place(jnp.zeros((*lead, *shape), dtype), sharding, stacked=bool(lead))

        return cls(
            keys=allocate(len(specs), layout, make),
            values=allocate(len(specs), layout, make),
            segment_ids=jnp.zeros((batch_size, capacity), jnp.int32),
            length=jnp.zeros((), jnp.int32),
        )

    @property
    def layout(self) -> Layout:
        """How the layers are stored."""
        return "leaves" if isinstance(self.keys, tuple) else "stacked"

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
        positions = before[:, None] + jnp.cumsum(segment_ids != 0, axis=1, dtype=jnp.int32) - 1
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
        return replace(self, segment_ids=kv_segments), mask_info, jnp.maximum(positions, 0)

    def update(
        self,
        layer: Layer,
        kv: tuple[Float[Array, "b s g k"], Float[Array, "b s g k"]],
        *,
        mask_info: MaskInfo,
        ragged: RaggedBatch | None = None,
        group: str = "full",
    ) -> tuple[DenseCache, Stored]:
        """Store this step's keys and values of one layer behind what is there; give all."""

        def put(storage: PerLayer, new: jax.Array) -> PerLayer:
            new = jnp.swapaxes(new, 1, 2)

            def update(array: jax.Array, at: tuple) -> jax.Array:
                block = new.astype(array.dtype).reshape((1,) * len(at) + new.shape)
                return jax.lax.dynamic_update_slice(array, block, (*at, 0, 0, self.length, 0))

            return update_layer(storage, layer, update)

        keys, values = put(self.keys, kv[0]), put(self.values, kv[1])
        stored = Stored(layer_of(keys, layer), layer_of(values, layer), mask_info, self.layout)
        return replace(self, keys=keys, values=values), stored

    def advance(self, count: int) -> DenseCache:
        """Move the write position after every layer has written its `count` tokens."""
        return replace(self, length=self.length + count)


def uniform(specs: Sequence[LayerCacheSpec]) -> LayerCacheSpec:
    """The one spec that all layers share.

    Raises:
        ValueError: the layers differ.
    """
    distinct = set(specs)
    if len(distinct) != 1:
        raise ValueError(
            f"this cache stores layers of one shape, but the model has {len(distinct)}: {distinct}"
        )
    return next(iter(distinct))


def place(array: jax.Array, sharding: jax.sharding.Sharding | None, *, stacked: bool) -> jax.Array:
    """Put per-layer storage on its devices; the layer axis of a stack is never sharded."""
    if sharding is None:
        return array
    if stacked and isinstance(sharding, jax.sharding.NamedSharding):
        spec = jax.sharding.PartitionSpec(None, *sharding.spec)
        sharding = jax.sharding.NamedSharding(sharding.mesh, spec)
    return jax.device_put(array, sharding)
