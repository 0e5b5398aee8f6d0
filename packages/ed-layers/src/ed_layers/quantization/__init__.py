"""Quantized weights: formats, arrays, and models with quantized matrices."""

from typing import TYPE_CHECKING

from ed_infra.lazy import attach

if TYPE_CHECKING:
    from ed_layers.quantization.encoding import encode as encode
    from ed_layers.quantization.formats import FORMATS as FORMATS
    from ed_layers.quantization.model import QuantParam as QuantParam
    from ed_layers.quantization.model import dequantize as dequantize
    from ed_layers.quantization.model import describe as describe
    from ed_layers.quantization.model import is_quantized as is_quantized
    from ed_layers.quantization.model import quantize as quantize
    from ed_layers.quantization.qarray import QArray as QArray
    from ed_layers.quantization.stored import Scales as Scales
    from ed_layers.quantization.stored import pack as pack

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "FORMATS": "ed_layers.quantization.formats",
        "QArray": "ed_layers.quantization.qarray",
        "QuantParam": "ed_layers.quantization.model",
        "Scales": "ed_layers.quantization.stored",
        "dequantize": "ed_layers.quantization.model",
        "describe": "ed_layers.quantization.model",
        "encode": "ed_layers.quantization.encoding",
        "is_quantized": "ed_layers.quantization.model",
        "pack": "ed_layers.quantization.stored",
        "quantize": "ed_layers.quantization.model",
    },
)
