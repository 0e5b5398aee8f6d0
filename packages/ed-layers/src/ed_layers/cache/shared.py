"""Layers that read the keys and values of an earlier layer and have none of their own (Gemma 4).

They keep nothing: `cache_specs` of such a layer is `()`. What the earlier layer's attention read is
handed on to them from layer to layer, with the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import jax
from ed_infra.masks import MaskInfo

from ed_layers.cache.protocol import Cache, KeysValues, Layer, Pages, Stored
from ed_layers.cache.ragged import RaggedBatch
from ed_layers.cache.storage import Layout

#: What attention reads of a layer: of a cache, or this step's keys and values where there is none.
Reading = Stored | Pages | KeysValues


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SharedKeys:
    """A cache, or none in training, and what the layers that share read of it; as short-lived as
    one step.

    Attributes:
        cache: of the layers that have keys and values.
        readings: group -> what the layer that shares has read.
        sharing: numbers of the layers that share, one for each group, static.
    """

    cache: Cache | None
    readings: Mapping[str, Reading]
    sharing: tuple[int, ...] = field(metadata={"static": True})

    @property
    def layout(self) -> Layout:
        """How the layers are stored."""
        return "leaves" if self.cache is None else self.cache.layout

    def update(
        self,
        layer: Layer,
        kv: KeysValues | None,
        *,
        mask_info: MaskInfo | None = None,
        ragged: RaggedBatch | None = None,
        group: str = "full",
    ) -> tuple[SharedKeys, Reading]:
        """Store this step's keys and values and give what attention reads; without any, give what
        the layer of the group that shares has read.

        A layer that shares has a known number: its kind occurs once, so it is not scanned.

        Raises:
            ValueError: no layer of the group has shared yet.
        """
        if kv is None:
            if group not in self.readings:
                raise ValueError(
                    f"layer {layer} has no keys, and no layer of group {group!r} before it shares "
                    f"its own; those that share are {self.sharing}"
                )
            return self, self.readings[group]
        cache, reading = self.cache, kv
        if cache is not None:
            cache, reading = cache.update(
                layer, kv, mask_info=mask_info, ragged=ragged, group=group
            )
        readings = self.readings
        if isinstance(layer, int) and layer in self.sharing:
            readings = {**readings, group: reading}
        return replace(self, cache=cache, readings=readings), reading
