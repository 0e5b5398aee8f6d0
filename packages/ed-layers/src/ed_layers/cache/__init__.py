"""Where keys and values live between steps. The layout of each class is its own business."""

from ed_layers.cache.codes import Format as Format
from ed_layers.cache.cross import CrossCache as CrossCache
from ed_layers.cache.dense import DenseCache as DenseCache
from ed_layers.cache.hybrid import HybridCache as HybridCache
from ed_layers.cache.paged import PagedCache as PagedCache
from ed_layers.cache.protocol import Cache as Cache
from ed_layers.cache.ragged import RaggedBatch as RaggedBatch
from ed_layers.cache.recurrent import RecurrentCache as RecurrentCache
from ed_layers.cache.spec import LayerCacheSpec as LayerCacheSpec
from ed_layers.cache.spec import RecurrentSpec as RecurrentSpec
from ed_layers.cache.spec import StateSpec as StateSpec
from ed_layers.cache.window import WindowCache as WindowCache
