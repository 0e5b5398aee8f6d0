"""Quantized weights of a model; see `ed_layers.quantization`."""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError
from ed_infra.specs import EasyDeLQuantizationConfig
from ed_layers.quantization.model import (
    QuantizationRules,
    dequantize,
    is_quantized,
    quantize,
)
from flax import nnx

ModelT = TypeVar("ModelT", bound="EasyQuantizationMixin")


class EasyQuantizationMixin(nnx.Module):
    """Quantizes weights; each method returns another model, sharded as this one."""

    config: EasyDeLBaseConfig

    @abstractmethod
    def shard_model(self: ModelT) -> ModelT:
        """Place every parameter on the mesh."""

    def quantize(self: ModelT, rules: QuantizationRules | None = None) -> ModelT:
        """Quantize the matrices that rules select; see `ed_layers.quantization.quantize`.

        Args:
            rules: None = the configuration's `quantization_config`.

        Raises:
            ConfigError: the model is quantized, a rule matches nothing, a group does not fit, or
                there are neither rules nor a `quantization_config`.
        """
        if rules is None:
            own = self.config.quantization_config
            if not isinstance(own, EasyDeLQuantizationConfig):
                raise ConfigError(
                    "quantize takes a configuration such as {'dtype': 'nf4'}, or rules; the "
                    "model's own configuration has no quantization_config"
                )
            rules = own
        return quantize(self, rules).shard_model()

    def dequantize(self: ModelT) -> ModelT:
        """Plain matrices again, of the values that codes stand for."""
        return dequantize(self).shard_model()

    @property
    def is_quantized(self) -> bool:
        """Whether a matrix is quantized."""
        return is_quantized(self)
