"""Quantized matrices in this project's own checkpoints: codes and scales are stored unchanged.

A matrix `model.layers.0.self_attn.q_proj.kernel` is the tensors `….kernel.codes`, `….kernel.scale`
and, where the format has them, `….kernel.zero`, `….kernel.scale.codes` and so on: the arrays of its
`QArray`, which is [in, out]. `quantization_config` of config.json has the rules that select the
modules; other parameters are stored as in every checkpoint.

These are own names because Hugging Face has no layout for most of the formats (nf4 with our double
quantization, the microscaling ones), and none for a fused tensor of which only a part is quantized.
A slice has the layout of the arrays on the devices, so reading does not transpose it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import CheckpointError, ConfigError
from ed_infra.rules import Rules
from ed_infra.specs import EasyDeLQuantizationConfig
from ed_layers.quantization.encoding import encode, with_float_zero
from ed_layers.quantization.formats import ACTIVATIONS_TOO
from ed_layers.quantization.model import MATRICES, quantized_matrices, to_rules
from ed_layers.quantization.qarray import QArray
from ed_layers.quantization.stored import Scales
from flax import nnx

from ed_models.weights.rules import Rule, equal

METHOD = "easydel"
#: Parts of a quantized matrix, by the names of fields.
_PARTS = ("codes", "scale", "scale.codes", "scale.scale", "scale.offset", "zero")
#: Rules of the weight table for them.
PARTS_AS_THEY_ARE: tuple[Rule, ...] = tuple(
    Rule(f"{{path}}.{matrix}.{part}", f"{{path}}.{matrix}.{part}", equal)
    for matrix in sorted(set(MATRICES.values()))
    for part in _PARTS
)
_MOST_RULES = 10_000


def get_matrix_parts(matrix: QArray) -> dict[str, Any]:
    """Return the arrays of a quantized matrix by name, in the order of the pytree leaves."""
    flat, _ = jax.tree_util.tree_flatten_with_path(matrix)
    return {".".join(key.name for key in path): leaf for path, leaf in flat}


def encoded_as(matrix: jax.Array, form: QArray) -> QArray:
    """Quantize one layer's matrix as a (perhaps abstract) quantized one is."""
    w = encode(
        matrix.mT if form.axis == -1 else matrix,
        form.format,
        form.group_size,
        double=isinstance(form.scale, Scales),
        activations=form.activations,
    )
    w = with_float_zero(w) if has_float_zero(form) else w
    return w.transpose() if form.axis == -1 else w


def has_float_zero(matrix: QArray) -> bool:
    """Return whether the scales and zeros of a quantized matrix are float32 numbers."""
    return matrix.zero is not None and matrix.zero.dtype == jnp.float32


def stored_rules(
    config: EasyDeLBaseConfig,
) -> Rules[EasyDeLQuantizationConfig | None] | None:
    """Which modules of a checkpoint are quantized, by its config.json; None: none, or by others.

    Raises:
        CheckpointError: the rules are damaged.
    """
    settings = config.quantization_config
    if not isinstance(settings, Mapping) or settings.get("quant_method") != METHOD:
        return None
    rules = settings.get("rules")
    if not isinstance(rules, list) or not 0 < len(rules) <= _MOST_RULES:
        raise CheckpointError(
            f"quantization_config of config.json has quant_method={METHOD!r} and no list of rules "
            f"(1 to {_MOST_RULES}): save the model again"
        )
    try:
        return to_rules([(str(pattern), fields) for pattern, fields in rules])
    except (ConfigError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"quantization_config of config.json contains an invalid rule: {error}"
        ) from error


def quantization_settings(model: nnx.Module) -> dict[str, Any] | None:
    """`quantization_config` for config.json; None for a model without quantized matrices."""
    by_fields: dict[tuple, set[str]] = {}
    for names, matrix in quantized_matrices(model):
        modules = {name.rpartition(".")[0] for name in names}
        by_fields.setdefault(tuple(_fields(matrix).items()), set()).update(modules)
    rules = [
        [pattern, dict(fields)]
        for fields, modules in by_fields.items()
        for pattern in build_patterns(modules)
    ]
    return {"quant_method": METHOD, "rules": rules} if rules else None


def _fields(matrix: QArray) -> dict[str, Any]:
    """The configuration that makes such a matrix."""
    names = {stored: name for name, stored in ACTIVATIONS_TOO.items()}
    dtype = names[matrix.format] if matrix.activations else matrix.format
    fields: dict[str, Any] = {"dtype": dtype, "group_size": matrix.group_size}
    fields |= {"double_quantization": True} if isinstance(matrix.scale, Scales) else {}
    return fields | ({"float_zero": True} if has_float_zero(matrix) else {})


def build_patterns(modules: Iterable[str]) -> Iterator[str]:
    """Regular expressions that match these modules and no others, few for many layers."""
    layers: dict[tuple[str, str], list[str]] = {}
    for name in sorted(modules):
        parts = re.fullmatch(r"(.*?)(?:\.(\d+)(\..*))?", name)
        assert parts is not None
        prefix, number, suffix = parts.groups()
        layers.setdefault((prefix, suffix or ""), []).append(number or "")
    for (prefix, suffix), numbers in layers.items():
        middle = rf"\.(?:{'|'.join(sorted(numbers, key=int))})" if suffix else ""
        yield f"^{re.escape(prefix)}{middle}{re.escape(suffix)}$"
