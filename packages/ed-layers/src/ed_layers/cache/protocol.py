"""What attention and a model expect of a cache.

Legend: b batch, s new tokens, g kv heads, t slots, k numbers of a key, d numbers of a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import jax
from ed_infra.masks import MaskInfo

from ed_layers.cache.codes import Codes, Numbers
from ed_layers.cache.ragged import RaggedBatch
from ed_layers.cache.spec import LayerCacheSpec as LayerCacheSpec
from ed_layers.cache.storage import Layer as Layer
from ed_layers.cache.storage import Layout, take_layer

CacheT = TypeVar("CacheT", bound="Cache")


@dataclass(frozen=True)
class Stored:
    """What attention reads of one layer of a contiguous cache.

    Attributes:
        keys, values: [b, g, t, k] and [b, g, t, d], or with a leading layer axis.
        at: index of the layer in keys and values, `(layer,)` or `()`.
        mask_info: who may attend to which slot.
        layout: how the cache stores its layers; where they are leaves, reading one copies nothing.
        ordered: slot i holds the token of order index i, so slots behind the newest are empty.
        sharding: of [b, g, t, k] where slots are split over devices; None = they are not.
    """

    keys: Numbers
    values: Numbers
    at: tuple[Layer, ...]
    mask_info: MaskInfo
    layout: Layout
    ordered: bool = False
    sharding: jax.sharding.NamedSharding | None = None

    @property
    def k(self) -> Numbers:
        """Keys of the layer, [b, g, t, k]."""
        return take_layer(self.keys, self.at)

    @property
    def v(self) -> Numbers:
        """Values of the layer, [b, g, t, d]."""
        return take_layer(self.values, self.at)

    @property
    def quantized(self) -> bool:
        """Whether codes are stored."""
        return isinstance(self.keys, Codes)


class Cache(Protocol):
    """A pytree that a step donates and gets back; a scan over layers carries it."""

    def update(
        self: CacheT,
        layer: Layer,
        kv: tuple[jax.Array, jax.Array] | None,
        *,
        mask_info: MaskInfo | None = None,
        ragged: RaggedBatch | None = None,
        group: str = "full",
    ) -> tuple[CacheT, Any]:
        """Store this step's keys and values of one layer, and give what its attention reads.

        Args:
            layer: which layer of the model.
            kv: [b, s, g, k] and [b, s, g, d]; None where a layer only reads.
            mask_info: who may attend to whom, as `begin` gave it.
            ragged: the flat batch of a serving step, for caches of pages.
            group: which kind of layer it is; see `attend`.
        """
        ...


def keys_values(kv: tuple[jax.Array, jax.Array] | None) -> tuple[jax.Array, jax.Array]:
    """This step's keys and values.

    Raises:
        ValueError: there are none.
    """
    if kv is None:
        raise ValueError(
            "a layer gave no keys and values to a cache that stores each step's own; only layers "
            'of the group "cross" read what was written before'
        )
    return kv
