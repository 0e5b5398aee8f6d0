"""Layers without keys and values, which read the keys and values of an earlier layer (Gemma 4).

Such a layer stores nothing: its `cache_specs` is `()`. The arrays that the attention of the earlier
layer read are passed from layer to layer with the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import jax
from ed_infra.masks import MaskInfo

from ed_layers.cache.protocol import (
    Cache,
    KeysValues,
    Layer,
    NewKeys,
    Pages,
    StoredLayer,
    keys_values,
)
from ed_layers.cache.ragged import RaggedBatch
from ed_layers.cache.storage import Layout

#: The arrays that attention reads: of a cache, or the keys and values of this step without a cache.
Reading = StoredLayer | Pages | KeysValues


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SharedKeys:
    """A cache (None in training), and the arrays that the sharing layers read. It lives for one
    step.

    Attributes:
        cache: cache of the layers that have keys and values.
        readings: group -> the arrays that the sharing layer read.
        sharing: numbers of the sharing layers, one per group, static.
    """

    cache: Cache | None
    readings: Mapping[str, Reading]
    sharing: tuple[int, ...] = field(metadata={"static": True})

    @property
    def layout(self) -> Layout:
        """Storage layout of the layers."""
        return "leaves" if self.cache is None else self.cache.layout

    def update(
        self,
        layer: Layer,
        kv: NewKeys | None,
        *,
        mask_info: MaskInfo | None = None,
        ragged: RaggedBatch | None = None,
        group: str = "full",
    ) -> tuple[SharedKeys, Reading]:
        """Store the keys and values of this step, and return the arrays that attention reads.
        Without keys and values, return the arrays of the sharing layer of the group.

        The number of a sharing layer is static: its kind occurs once, so the layer is not scanned.

        Raises:
            ValueError: no sharing layer of the group precedes this layer.
        """
        if kv is None:
            if group not in self.readings:
                raise ValueError(
                    f"layer {layer} has no keys, and no layer of group {group!r} before it shares "
                    f"its own; those that share are {self.sharing}"
                )
            return self, self.readings[group]
        cache = self.cache
        if cache is None:
            reading = keys_values(kv, values_in_keys=True)
        else:
            cache, reading = cache.update(
                layer, kv, mask_info=mask_info, ragged=ragged, group=group
            )
        readings = self.readings
        if isinstance(layer, int) and layer in self.sharing:
            readings = {**readings, group: reading}
        return replace(self, cache=cache, readings=readings), reading
