"""Quantized weights of a model; see `ed_layers.quantization`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

from ed_infra.errors import ConfigError
from ed_infra.specs import EasyDeLQuantizationConfig
from ed_layers.quantization.model import QuantizationRules, dequantize, quantize

if TYPE_CHECKING:
    from ed_infra.config import EasyDeLBaseConfig

M = TypeVar("M")


def quantize_model(model: M, rules: QuantizationRules | None) -> M:
    """Return a quantized copy of a model; see `EasyDeLBaseModule.quantize`."""
    module: Any = model
    if rules is None:
        config: EasyDeLBaseConfig = module.config
        config_rules = config.quantization_config
        if not isinstance(config_rules, EasyDeLQuantizationConfig):
            raise ConfigError(
                "quantize requires rules or a configuration such as {'dtype': 'nf4'}: the "
                "configuration of the model has no quantization_config"
            )
        rules = config_rules
    return cast(M, quantize(module, rules).shard_model())


def dequantize_model(model: M) -> M:
    """Return a copy of a model with plain matrices."""
    return cast(M, dequantize(cast(Any, model)).shard_model())
