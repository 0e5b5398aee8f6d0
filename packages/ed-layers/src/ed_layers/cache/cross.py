"""The cache of cross-attention: keys and values of an encoder, written once, then read.

Legend: b batch, g kv heads, t encoder positions, k key dim, d value dim, s queries, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from ed_infra.masks import MaskInfo
from jaxtyping import Array, Float, Int

from ed_layers.cache.codes import Format
from ed_layers.cache.dense import to_slots
from ed_layers.cache.protocol import Stored
from ed_layers.cache.ragged import RaggedBatch
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
    data_fields=["keys", "values", "segment_ids"],
    meta_fields=[],
)
@dataclass(frozen=True)
class CrossCache:
    """Keys and values as [b, g, t, k] per layer, with the encoder's mask.

    Attributes:
        keys, values: per layer [b, g, t, k] and [b, g, t, d]; codes and scales if quantized.
        segment_ids: which positions of the encoder hold a token, [b, t].
    """

    keys: PerLayer
    values: PerLayer
    segment_ids: Int[Array, "b t"]

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
    ) -> CrossCache:
        """Allocate an empty cache for an encoder of `capacity` positions; see `DenseCache`."""
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
        return cls(keys, values, jnp.zeros((batch_size, capacity), jnp.int32))

    @property
    def layout(self) -> Layout:
        """How the layers are stored."""
        return layout_of(self.keys)

    def update(
        self,
        layer: Layer,
        kv: tuple[Float[Array, "b t g k"], Float[Array, "b t g d"]] | None,
        *,
        mask_info: MaskInfo,
        ragged: RaggedBatch | None = None,
        group: str = "cross",
    ) -> tuple[CrossCache, Stored]:
        """Write an encoder's keys and values, or read those that are there.

        Args:
            kv: of at most `capacity` positions, or None to read.
            mask_info: its `q_segment_ids` say which queries are padding; with `kv`, its
                `kv_segment_ids` say which positions of the encoder are. Order plays no part.
        """
        keys, values, segments = self.keys, self.values, self.segment_ids
        if kv is not None:
            if kv[0].shape[1] > segments.shape[1]:
                raise ValueError(
                    f"an encoder's {kv[0].shape[1]} positions do not fit into a cache for "
                    f"{segments.shape[1]}; create it with room for them"
                )
            keys, values = (
                write_slots(storage, layer, to_slots(new, storage), 0)
                for storage, new in zip((keys, values), kv, strict=True)
            )
            given = (mask_info.kv_segment_ids != 0).astype(jnp.int32)
            segments = jax.lax.dynamic_update_slice(jnp.zeros_like(segments), given, (0, 0))
        queries = (mask_info.q_segment_ids != 0).astype(jnp.int32)
        mask = MaskInfo(
            queries, segments, mask_info.q_index, jnp.zeros_like(segments), causal=False
        )
        (k, at), (v, _) = locate(keys, layer), locate(values, layer)
        cache = replace(self, keys=keys, values=values, segment_ids=segments)
        return cache, Stored(k, v, at, mask, self.layout)
