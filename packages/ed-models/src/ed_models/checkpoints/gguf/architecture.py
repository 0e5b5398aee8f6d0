"""An architecture of GGUF files: a row that relates its metadata and tensors to a model type.

`FileReading` gives access to the metadata of a file, and `FileWriting` collects that of a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from ed_infra.errors import CheckpointError

from ed_models.checkpoints.gguf.blocks import read_tensor_values
from ed_models.checkpoints.gguf.header import GgufHeader
from ed_models.checkpoints.gguf.layouts import TENSOR_NAMES, build_module_rules
from ed_models.weights.rules import Rule

if TYPE_CHECKING:
    from ed_infra.config import EasyDeLBaseConfig

#: Field of a configuration -> key of the metadata, after the name of the architecture.
_FIELDS: Mapping[str, str] = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
#: Fields of models whose norms subtract the mean.
LAYER_NORM: Mapping[str, str | None] = {
    "rms_norm_eps": None,
    "layer_norm_eps": "attention.layer_norm_epsilon",
}
#: Fields of models with experts.
EXPERT_COUNTS: Mapping[str, str | None] = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
}
#: `expert_gating_func` of llama.cpp.
GATES: Mapping[int, str] = {1: "softmax", 2: "sigmoid"}


@dataclass(frozen=True)
class Architecture:
    """A row of the table.

    Attributes:
        name: `general.architecture` of a file.
        model_type: the model type of the configuration.
        names: modules whose tensors have other names than in `TENSOR_NAMES`.
        rules: rules in front of those of the names.
        fields: fields of the configuration in addition to `_FIELDS`; None removes a field.
        constants: fields that the architecture implies.
        present: field -> tensors, of which a file has one if the field is set.
        required: field -> the only value with which llama.cpp computes the model's numbers.
        has_head: whether llama.cpp requires a head, also of a model whose head is the embedding.
        shifted: whether the weights of norms are stored plus one.
        when: whether a file of this name is of this row; rows of one name are asked in order.
        suits: whether a configuration of this model type is of this row.
        read: further fields of the configuration.
        write: further metadata.
        rotary: whether the model has rotary positions.
        reshaped: (name, shape by the rules, configuration) -> shape in a file.
    """

    name: str
    model_type: str
    names: Mapping[str, str] = field(default_factory=dict)
    rules: Sequence[Rule] = ()
    fields: Mapping[str, str | None] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    present: Mapping[str, Sequence[str]] = field(default_factory=dict)
    required: Mapping[str, object] = field(default_factory=dict)
    has_head: bool = False
    shifted: bool = False
    when: Callable[[FileReading], bool] = lambda _: True
    suits: Callable[[Any], bool] = lambda _: True
    read: Callable[[FileReading], Mapping[str, Any]] = lambda _: {}
    write: Callable[[FileWriting], None] = lambda _: None
    rotary: bool = True
    reshaped: Callable[[str, tuple[int, ...], Any], tuple[int, ...]] = lambda _, shape, __: shape

    @property
    def keys(self) -> Mapping[str, str]:
        """Field of the configuration -> key of the metadata."""
        field_keys = {**_FIELDS, **self.fields}
        return {name: key for name, key in field_keys.items() if key is not None}

    def all_rules(self) -> tuple[Rule, ...]:
        """Return the rules of a model with a head."""
        return (*self.rules, *build_module_rules({**TENSOR_NAMES, **self.names}))


def with_bodies(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return rules, and those of bodies without a head, whose names lack the first part."""

    def shorten_names(rule: Rule) -> Rule:
        names = (rule.ours,) if isinstance(rule.ours, str) else rule.ours
        return rule._replace(ours=tuple(name.removeprefix("model.") for name in names))

    return (*rules, *map(shorten_names, rules))


class FileReading:
    """Metadata and tensors of a file.

    Args:
        header: the content of the file.
        architecture: the name of the architecture.
        values: returns the values of a small tensor; None reads the file.
    """

    def __init__(
        self,
        header: GgufHeader,
        architecture: str,
        values: Callable[[str], np.ndarray] | None = None,
    ):
        self.header, self.architecture = header, architecture
        self.values = values or partial(read_tensor_values, header)

    def get(self, key: str, default: object = None) -> Any:
        """Return a value of the architecture; `default` if it is absent.

        An array of equal numbers, one for each layer, is that number.
        """
        value = self.header.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, np.ndarray):
            unique = np.unique(value)
            if len(unique) != 1:
                raise CheckpointError(
                    f"{self.header.file}: {self.architecture}.{key} differs from layer to layer "
                    f"({value[:8].tolist()}…), which models of this type do not support"
                )
            return unique[0].item()
        return value

    def need(self, key: str) -> Any:
        """Return a value that must be there.

        Raises:
            CheckpointError: the value is absent.
        """
        value = self.get(key)
        if value is None:
            raise CheckpointError(
                f"{self.header.file} has no {self.architecture}.{key}, which the architecture "
                "needs: convert the model again"
            )
        return value

    def array(self, key: str) -> list[Any]:
        """Return an array of the architecture; an empty list if it is absent."""
        value = self.header.metadata.get(f"{self.architecture}.{key}", ())
        if isinstance(value, np.ndarray):
            return value.tolist()
        return list(value) if isinstance(value, list | tuple) else []

    def has(self, *tensors: str) -> bool:
        """Whether the file has one of these tensors."""
        return any(tensor in self.header.tensors for tensor in tensors)

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return the shape of a tensor that must be there.

        Raises:
            CheckpointError: the tensor is absent.
        """
        if tensor not in self.header.tensors:
            raise CheckpointError(
                f"{self.header.file} has no tensor {tensor!r}, so it holds no {self.architecture} "
                "model"
            )
        return self.header.tensors[tensor].shape


class FileWriting:
    """Metadata and additional tensors of a new file.

    `unlike` lists the values with which llama.cpp computes other numbers.
    """

    def __init__(self, config: EasyDeLBaseConfig, architecture: str):
        self.config, self.architecture = config, architecture
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, np.ndarray] = {}
        self.unlike: list[str] = []

    def set(self, key: str, value: object) -> None:
        """Set a value of the architecture; None is left out."""
        if value is not None:
            self.metadata[f"{self.architecture}.{key}"] = value
