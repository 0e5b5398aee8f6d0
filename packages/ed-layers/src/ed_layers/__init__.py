"""Attention, caches, norms, rotary embeddings, depth, remat and losses of JAX language models."""

from typing import TYPE_CHECKING

from ed_infra.lazy import attach

if TYPE_CHECKING:
    from ed_layers.attention import MECHANISMS as MECHANISMS
    from ed_layers.attention import Mechanism as Mechanism
    from ed_layers.attention import attend as attend
    from ed_layers.cache import CrossCache as CrossCache
    from ed_layers.cache import DenseCache as DenseCache
    from ed_layers.cache import HybridCache as HybridCache
    from ed_layers.cache import LayerCacheSpec as LayerCacheSpec
    from ed_layers.cache import PagedCache as PagedCache
    from ed_layers.cache import RaggedBatch as RaggedBatch
    from ed_layers.cache import RecurrentCache as RecurrentCache
    from ed_layers.cache import RecurrentSpec as RecurrentSpec
    from ed_layers.cache import StateSpec as StateSpec
    from ed_layers.cache import WindowCache as WindowCache
    from ed_layers.context import Ctx as Ctx
    from ed_layers.depth.stack import Stack as Stack
    from ed_layers.depth.stack import to_layout as to_layout
    from ed_layers.losses import cross_entropy_sum as cross_entropy_sum
    from ed_layers.losses import token_logprobs as token_logprobs
    from ed_layers.mlp import GatedMLP as GatedMLP
    from ed_layers.norms import RMSNorm as RMSNorm
    from ed_layers.projections.embed import Embed as Embed
    from ed_layers.projections.linear import Linear as Linear
    from ed_layers.quantization import QArray as QArray
    from ed_layers.quantization import dequantize as dequantize
    from ed_layers.quantization import is_quantized as is_quantized
    from ed_layers.quantization import quantize as quantize
    from ed_layers.rotary import apply_rotary as apply_rotary
    from ed_layers.rotary import rope_tables as rope_tables

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "CrossCache": "ed_layers.cache",
        "Ctx": "ed_layers.context",
        "DenseCache": "ed_layers.cache",
        "Embed": "ed_layers.projections.embed",
        "GatedMLP": "ed_layers.mlp",
        "HybridCache": "ed_layers.cache",
        "LayerCacheSpec": "ed_layers.cache",
        "Linear": "ed_layers.projections.linear",
        "MECHANISMS": "ed_layers.attention",
        "Mechanism": "ed_layers.attention",
        "PagedCache": "ed_layers.cache",
        "QArray": "ed_layers.quantization",
        "RMSNorm": "ed_layers.norms",
        "RaggedBatch": "ed_layers.cache",
        "RecurrentCache": "ed_layers.cache",
        "RecurrentSpec": "ed_layers.cache",
        "Stack": "ed_layers.depth.stack",
        "StateSpec": "ed_layers.cache",
        "WindowCache": "ed_layers.cache",
        "apply_rotary": "ed_layers.rotary",
        "attend": "ed_layers.attention",
        "cross_entropy_sum": "ed_layers.losses",
        "dequantize": "ed_layers.quantization",
        "is_quantized": "ed_layers.quantization",
        "quantize": "ed_layers.quantization",
        "rope_tables": "ed_layers.rotary",
        "to_layout": "ed_layers.depth.stack",
        "token_logprobs": "ed_layers.losses",
    },
)
