"""`PlanTensor`: one parameter of a model for a plan, and the cache of one layer. No jax."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ed_infra.sharding.axes import LogicalAxes

#: Bytes of a value by dtype.
DTYPE_SIZES: dict[str, int] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
}


@dataclass(frozen=True)
class CodeStorage:
    """The storage of a quantized matrix.

    Attributes:
        code: bytes of a code.
        scale: bytes of the scale and of the zero of a group.
        group: codes that share a scale; None = all of a column.
    """

    code: float
    scale: int
    group: int | None


@dataclass(frozen=True)
class PlanTensor:
    """A parameter that `layers` layers have.

    Attributes:
        name: its name, with `*` for the number of the layer.
        shape: shape in one layer.
        axes: logical axes of the dimensions.
        layers: number of layers with this parameter.
        dtype: dtype of the storage; empty = the parameter dtype of the run.
        adapter: whether it is part of a LoRA adapter.
        codes: storage of the codes of a file that the run keeps; None = no codes are kept.
    """

    name: str
    shape: tuple[int, ...]
    axes: LogicalAxes
    layers: int = 1
    dtype: str = ""
    adapter: bool = False
    codes: CodeStorage | None = None

    @property
    def size(self) -> int:
        """Number of values over all layers."""
        return math.prod(self.shape) * self.layers

    @property
    def is_table(self) -> bool:
        """Whether this is an embedding: a gather instead of a matrix product reads it."""
        return self.name.endswith("embedding")

    @property
    def is_matrix(self) -> bool:
        """Whether a token multiplies this parameter."""
        return len(self.shape) >= 2 and not self.is_table


@dataclass(frozen=True)
class CacheShape:
    """Keys and values of one layer: heads, sizes, and the window (None = all tokens)."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None


@dataclass(frozen=True)
class StateShape:
    """One recurrent or convolution state of a layer: its size, and its dtype.

    Attributes:
        size: numbers for each sequence.
        dtype: dtype, if it is not that of the computation; "" otherwise.
    """

    size: int
    dtype: str


@dataclass(frozen=True)
class ModelShapes:
    """What a plan knows about a model.

    Attributes:
        model_type: Hugging Face's name of the architecture.
        config: fields of the architecture that a plan reads.
        tensors: all parameters.
        caches: one entry for each layer with keys and values.
        states: the states of all recurrent and convolution layers.
    """

    model_type: str
    config: Mapping[str, Any]
    tensors: tuple[PlanTensor, ...]
    caches: tuple[CacheShape, ...]
    states: tuple[StateShape, ...] = ()

    def count_state_bytes(self, dtype: str) -> int:
        """Return the bytes of the states of one sequence on each device.

        Args:
            dtype: dtype of the computation.
        """
        return sum(one.size * DTYPE_SIZES[one.dtype or dtype] for one in self.states)

    @property
    def parameters(self) -> int:
        """Number of parameters of the model, without adapters."""
        return sum(tensor.size for tensor in self.tensors if not tensor.adapter)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return int(self.config["num_hidden_layers"])

    @property
    def hidden(self) -> int:
        """Size of the hidden states."""
        return int(self.config["hidden_size"])

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return int(self.config["vocab_size"])

    @property
    def heads(self) -> int:
        """Number of query heads; 0 without attention."""
        return int(self.config["num_attention_heads"] or 0)

    @property
    def head_dim(self) -> int:
        """Size of a query head."""
        return int(self.config.get("head_dim") or self.hidden // max(self.heads, 1))

    @property
    def kv_heads(self) -> int:
        """Number of heads of keys and values."""
        return int(self.config.get("num_key_value_heads") or self.heads)

    @property
    def active(self) -> int:
        """Number of matrix parameters that one token uses, with the head."""
        per_token = int(self.config.get("num_experts_per_tok") or 0)
        total, head = 0, False
        for tensor in self.tensors:
            if not tensor.is_matrix or tensor.adapter:
                continue
            head |= tensor.axes[-1:] == ("vocab",)
            size = tensor.size
            if tensor.axes[:1] == ("expert",):
                size = size * min(per_token, tensor.shape[0]) // tensor.shape[0]
            total += size
        return total if head else total + self.vocabulary * self.hidden
