"""Where keys and values live between steps. The layout of each class is its own business."""

from ed_layers.cache.dense import DenseCache as DenseCache
from ed_layers.cache.paged import PagedCache as PagedCache
from ed_layers.cache.protocol import Cache as Cache
from ed_layers.cache.protocol import LayerCacheSpec as LayerCacheSpec
from ed_layers.cache.ragged import RaggedBatch as RaggedBatch
