"""Caches of keys, values and states. Only a class knows the layout of its arrays.

- `spec`: the memory that a layer needs; `ragged`: the flat batch of a serving step
- `protocol`: the interfaces of models, layers and engines, and the records for attention
- `contiguous`, `cross`, `paged`, `recurrent`: the caches
- `hybrid`: one cache per kind, for models with different layers
- `storage`, `codes`, `sharded`: arrays of many layers, in 8 bits, and split over devices
"""

from typing import TYPE_CHECKING

from ed_infra.lazy import attach

if TYPE_CHECKING:
    from ed_layers.cache.codes import Format as Format
    from ed_layers.cache.contiguous import DenseCache as DenseCache
    from ed_layers.cache.contiguous import WindowCache as WindowCache
    from ed_layers.cache.cross import CrossCache as CrossCache
    from ed_layers.cache.cross import CrossSlots as CrossSlots
    from ed_layers.cache.hybrid import HybridCache as HybridCache
    from ed_layers.cache.paged import PagedCache as PagedCache
    from ed_layers.cache.protocol import Cache as Cache
    from ed_layers.cache.protocol import ContiguousCache as ContiguousCache
    from ed_layers.cache.protocol import StateCache as StateCache
    from ed_layers.cache.ragged import RaggedBatch as RaggedBatch
    from ed_layers.cache.recurrent import RecurrentCache as RecurrentCache
    from ed_layers.cache.spec import LayerCacheSpec as LayerCacheSpec
    from ed_layers.cache.spec import RecurrentSpec as RecurrentSpec
    from ed_layers.cache.spec import StateSpec as StateSpec

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Cache": "ed_layers.cache.protocol",
        "ContiguousCache": "ed_layers.cache.protocol",
        "CrossCache": "ed_layers.cache.cross",
        "CrossSlots": "ed_layers.cache.cross",
        "DenseCache": "ed_layers.cache.contiguous",
        "Format": "ed_layers.cache.codes",
        "HybridCache": "ed_layers.cache.hybrid",
        "LayerCacheSpec": "ed_layers.cache.spec",
        "PagedCache": "ed_layers.cache.paged",
        "RaggedBatch": "ed_layers.cache.ragged",
        "RecurrentCache": "ed_layers.cache.recurrent",
        "RecurrentSpec": "ed_layers.cache.spec",
        "StateCache": "ed_layers.cache.protocol",
        "StateSpec": "ed_layers.cache.spec",
        "WindowCache": "ed_layers.cache.contiguous",
    },
)
