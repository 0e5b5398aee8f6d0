"""Quantization of models, by ordered rules over module names, and the inverse.

Rules can select the matrices of linear layers, of the linear layers of experts, and of embeddings.
Norms, convolutions, routers, biases and decays are never quantized.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import UnionType
from typing import Any, TypeVar

import jax
from ed_infra import parameter_names
from ed_infra.errors import ConfigError
from ed_infra.logging import get_logger, once
from ed_infra.rules import Rules
from ed_infra.specs import QUANTIZATION_FIELD_ALIASES, EasyDeLQuantizationConfig, from_mapping
from flax import nnx

from ed_layers.projections.embed import Embed
from ed_layers.projections.linear import ExpertLinear, Linear
from ed_layers.quantization.encoding import encode_matrix
from ed_layers.quantization.qarray import QArray
from ed_layers.quantization.simulated import Simulated
from ed_layers.quantization.stored import Scales
from ed_layers.transform import Replace, transform

logger = get_logger(__name__)

M = TypeVar("M", bound=nnx.Module)

#: Rules that select modules and their formats.
QuantizationRules = (
    EasyDeLQuantizationConfig
    | Mapping[str, Any]
    | Rules[EasyDeLQuantizationConfig | None]
    | Sequence[tuple[str, EasyDeLQuantizationConfig | Mapping[str, Any] | None]]
)

#: Class of a module with a matrix -> name of the matrix attribute.
MATRICES: dict[type[nnx.Module], str] = {
    Linear: "kernel",
    ExpertLinear: "kernel",
    Embed: "embedding",
}


class QuantParam(nnx.Variable):
    """A quantized matrix (`QArray`), which optimizers ignore."""


def quantize(model: M, rules: QuantizationRules) -> M:
    """Return a copy of a model with quantized matrices; the copy shares the other arrays.

    Args:
        model: any module. Scanned and unrolled layers receive the same codes.
        rules: (pattern, configuration) pairs, searched in the module names
            (`model.layers.3.self_attn.q_proj`) in order. The first match applies; None leaves a
            module unchanged. Alternatively one configuration, which selects by its `pattern`.

    Raises:
        ConfigError: the model is quantized, a rule matches no module, or a group size is not
            possible.
    """
    if is_quantized(model):
        raise ConfigError(
            "the model is quantized, and codes cannot be quantized again: give all rules at once, "
            "or call dequantize first"
        )
    replacements: dict[EasyDeLQuantizationConfig, Replace] = {}

    def replacement(spec: EasyDeLQuantizationConfig | None) -> Replace | None:
        return (
            None if spec is None else replacements.setdefault(spec, partial(_quantize_module, spec))
        )

    replace = to_rules(rules).map(replacement)
    return transform(model, replace, of=tuple(MATRICES))


def to_rules(rules: QuantizationRules) -> Rules[EasyDeLQuantizationConfig | None]:
    """Convert the `rules` of `quantize` to pairs."""
    if isinstance(rules, Rules):
        return rules
    if isinstance(rules, EasyDeLQuantizationConfig | Mapping):
        spec = to_spec(rules)
        rules = [(spec.pattern, spec)]
    pairs = ((p, None if value is None else to_spec(value)) for p, value in rules)
    return Rules(pairs, kind="quantization rule")


def to_spec(value: EasyDeLQuantizationConfig | Mapping[str, Any]) -> EasyDeLQuantizationConfig:
    """Return a configuration, also from a mapping of its fields."""
    return from_mapping(EasyDeLQuantizationConfig, value, QUANTIZATION_FIELD_ALIASES)


def warn_of_plain_weights(rules: QuantizationRules) -> None:
    """Warn once that the weights of a model with quantization rules are not quantized."""
    single = isinstance(rules, EasyDeLQuantizationConfig | Mapping)
    once(
        logger,
        f"the weights are not quantized{f' to {to_spec(rules).dtype}' if single else ''}: "
        "quantization_config and bits only store the rules of model.quantize(). Call "
        "model.quantize(), or load a checkpoint with apply_quantization=True (False: no warning)",
    )


def get_matrix(module: nnx.Module) -> tuple[str, nnx.Variable]:
    """Return the name and the variable of a module's matrix."""
    name = next(name for cls, name in MATRICES.items() if isinstance(module, cls))
    return name, getattr(module, name)


def _quantize_module(
    spec: EasyDeLQuantizationConfig, module: nnx.Module, _: jax.Array
) -> nnx.Module:
    name, variable = get_matrix(module)
    value = variable.get_value()
    matrix = value.value if isinstance(value, Simulated) else value
    rows, absorbed = isinstance(module, Embed), isinstance(module, Linear) and module.absorbed
    axes = variable.get_metadata().get("axes")
    w = encode_matrix(spec, matrix, rows=rows, absorbed=absorbed)
    if spec.simulate:
        seen = Simulated(matrix, spec, absorbed, w.axis)
        setattr(module, name, nnx.Param(seen, axes=axes))
    else:
        setattr(module, name, QuantParam(w, axes=axes))
    return module


def simulate_in_place(model: nnx.Module, spec: EasyDeLQuantizationConfig) -> None:
    """Let the products of a model read its matrices in a format.

    The variables of the model stay, so that references to the model remain valid.

    Args:
        model: a model with plain matrices, or one that simulates this format.
        spec: the format, with `simulate`.

    Raises:
        ConfigError: the model is quantized or simulates another format, or a group size is not
            possible.
    """
    present = {w.spec for _, w in _matrices(model, Simulated)}
    if present - {spec}:
        names = ", ".join(sorted({other.dtype for other in present}))
        raise ConfigError(
            f"the model simulates {names} by other settings, and one format is possible: set the "
            "format once"
        )
    if not present:
        nnx.update(model, nnx.state(quantize(model, spec)))


def dequantize(model: M) -> M:
    """Return a copy of a model with plain matrices, which contain the values of the codes.

    Matrices that simulate a format also become plain, with their trained values.

    Raises:
        ConfigError: no matrix is quantized or simulates a format.
    """
    if next(_matrices(model, QArray | Simulated), None) is None:
        raise ConfigError("no matrix of the model is quantized, or simulates it")
    return transform(
        model, Rules([("", _dequantize_module)], kind="quantization rule"), of=tuple(MATRICES)
    )


def _dequantize_module(module: nnx.Module, _: jax.Array) -> nnx.Module:
    name, variable = get_matrix(module)
    value = variable.get_value()
    if not isinstance(value, jax.Array):
        dense_matrix = value.value if isinstance(value, Simulated) else value.dense()
        setattr(module, name, nnx.Param(dense_matrix, axes=variable.get_metadata().get("axes")))
    return module


def _matrices(model: nnx.Module, of: type | UnionType) -> Iterator[tuple[list[str], Any]]:
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        value = variable.get_value()
        if isinstance(value, of):
            yield parameter_names.canonical(path), value


def quantized_matrices(model: nnx.Module) -> Iterator[tuple[list[str], QArray]]:
    """Return the canonical names of the layers of a quantized matrix, and the matrix."""
    return _matrices(model, QArray)


def is_quantized(model: nnx.Module) -> bool:
    """Return whether a matrix of the model is quantized."""
    return next(quantized_matrices(model), None) is not None


def describe(model: nnx.Module) -> str:
    """Describe the formats of the matrices, one line each: number of matrices, and bytes per
    weight."""
    counts: dict[str, list[int]] = {}
    for names, w in _matrices(model, QArray | Simulated):
        if isinstance(w, QArray):
            kind = f"{w.format}, groups of {w.group_size}"
            kind += ", scales in 8 bits" if isinstance(w.scale, Scales) else ""
            kind += ", activations in 8 bits" if w.activations else ""
        else:
            kind = f"{w.spec.dtype}, simulated"
        total = counts.setdefault(kind, [0, 0, 0])
        for i, more in enumerate((len(names), w.nbytes, math.prod(w.shape))):
            total[i] += more
    return "\n".join(
        f"{kind}: {matrices} matrices, {size} weights, {nbytes / size:.3f} bytes a weight"
        for kind, (matrices, nbytes, size) in sorted(counts.items())
    )
