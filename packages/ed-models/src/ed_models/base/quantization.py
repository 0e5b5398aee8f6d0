"""Quantized weights of a model; see `ed_layers.quantization`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ed_infra.errors import ConfigError
from ed_infra.specs import (
    QUANTIZATION_FIELD_ALIASES,
    EasyDeLQuantizationConfig,
    from_mapping,
)
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


#: EasyDeL's names of the fields of a quantization.
_FIELDS = {**QUANTIZATION_FIELD_ALIASES, "quantization_pattern": "pattern"}


def merge_rules(
    rules: QuantizationRules | None,
    other: QuantizationRules | None,
    fields: Mapping[str, object],
) -> QuantizationRules | None:
    """Return the rules of `EasyDeLBaseModule.quantize` from its three ways to name them.

    Raises:
        ConfigError: several of them have values, or a field is unknown.
    """
    ways = [way for way in (rules, other, dict(fields) or None) if way is not None]
    if len(ways) > 1:
        raise ConfigError("pass rules, quantization_config or fields of one configuration")
    if fields:
        return from_mapping(EasyDeLQuantizationConfig, fields, _FIELDS)
    return ways[0] if ways else None


def dequantize_model(model: M) -> M:
    """Return a copy of a model with plain matrices."""
    return cast(M, dequantize(cast(Any, model)).shard_model())
