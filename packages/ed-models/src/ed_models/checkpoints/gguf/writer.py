"""Write a model as a GGUF file that llama.cpp runs.

Norms, biases and the weights of routers are float32 in every file, as llama.cpp expects. Other
matrices have the chosen format; a matrix whose rows are no whole blocks is float16.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import CheckpointError, ConfigError, did_you_mean

from ed_models.checkpoints.gguf.architecture import Architecture, with_bodies
from ed_models.checkpoints.gguf.header import GgufHeader, Location
from ed_models.checkpoints.gguf.representable import check_represented
from ed_models.checkpoints.gguf.settings import EMBEDDING, HEAD, write_settings
from ed_models.checkpoints.weight_map import WeightMap
from ed_models.weights.blocks import Shape


class FileType(NamedTuple):
    """A format of matrices.

    Attributes:
        number: `general.file_type`.
        matrices: format of the matrices of layers.
        outer: format of the embedding and the head.
    """

    number: int
    matrices: str
    outer: str


#: Name of a format -> its formats of tensors. llama.cpp's `llama-quantize` converts to others.
GGUF_FILE_TYPES: Mapping[str, FileType] = {
    "f32": FileType(0, "F32", "F32"),
    "f16": FileType(1, "F16", "F16"),
    "bf16": FileType(32, "BF16", "BF16"),
    "q8_0": FileType(7, "Q8_0", "Q8_0"),
    "q4_0": FileType(2, "Q4_0", "Q8_0"),
}
#: Parts of the names of tensors that llama.cpp reads as float32.
_FLOAT32 = (
    *(".ffn_gate_inp.", ".ffn_gate_inp_shexp.", ".ssm_", ".shortconv.conv.", ".attn_rel_b."),
    *("position_embd.", "token_types.", ".attn_sinks.", ".exp_probs_b."),
)
_KEPT_AS_MATRIX = (".ssm_in.", ".ssm_out.", ".ssm_x.", ".ssm_dt.weight")
_OUTER = ("token_embd.", "output.weight")


def file_type(name: str) -> FileType:
    """Return a format of files.

    Raises:
        ConfigError: the name is unknown.
    """
    if name.lower() not in GGUF_FILE_TYPES:
        hint = did_you_mean(name.lower(), GGUF_FILE_TYPES)
        raise ConfigError(
            f"dtype={name!r} is no format of GGUF files{hint} "
            f"(known: {', '.join(GGUF_FILE_TYPES)}): write one of these and convert it "
            "with llama-quantize"
        )
    return GGUF_FILE_TYPES[name.lower()]


def write_file(
    path: Path,
    row: Architecture,
    config: EasyDeLBaseConfig,
    shapes: Mapping[str, Shape],
    read: Callable[[str, tuple[int, ...]], np.ndarray],
    *,
    dtype: str,
    name: str,
    tokenizer: Mapping[str, Any],
) -> None:
    """Write the parameters of a model.

    The file is complete or absent: it is written under another name and moved.

    Args:
        path: the file.
        row: the architecture of the model.
        config: the configuration of the model.
        shapes: canonical name -> shape of one layer's parameter.
        read: (canonical name, leading positions) -> values: one expert of many, or the whole.
        dtype: a key of `GGUF_FILE_TYPES`.
        name: `general.name`.
        tokenizer: metadata of the tokenizer.

    Raises:
        CheckpointError: the architecture has no tensor for a parameter, or llama.cpp computes
            other numbers for a value of the configuration.
    """
    from gguf import GGUFWriter
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize

    form = file_type(dtype)
    try:
        weights = WeightMap(with_bodies(row.all_rules()), shapes, config)
    except ConfigError as error:
        raise CheckpointError(
            f"the architecture {row.name!r} of llama.cpp lacks a parameter of this model: {error}"
        ) from error
    settings = write_settings(config, row)
    tensors: list[tuple[str, Shape, str]] = []
    for tensor, shape in weights.hf_shapes.items():
        stored = row.reshaped(tensor, shape, config)
        tensors.append((tensor, stored, _format(tensor, stored, form)))
    if row.has_head and HEAD not in weights.hf_shapes:
        tensors.append((HEAD, weights.hf_shapes[EMBEDDING], form.outer))
    metadata = {"general.architecture": row.name, "general.name": name}
    metadata |= {"general.file_type": form.number, "general.quantization_version": 2}
    metadata |= {**settings.metadata, **tokenizer}
    located = {tensor: Location(kind, stored, 0, 0) for tensor, stored, kind in tensors}
    located |= {name: Location("F32", x.shape, 0, 0) for name, x in settings.tensors.items()}
    listed = {key: np.asarray(x) if isinstance(x, list) else x for key, x in metadata.items()}
    check_represented(config, row, GgufHeader(path, listed, located), settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, staging = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    try:
        writer = GGUFWriter(staging, row.name)
        for key, value in metadata.items():
            if key != "general.architecture":  # which the writer adds
                _add(writer, key, value)
        for tensor, values in settings.tensors.items():
            _declare(writer, tensor, values.shape, "F32")
        for tensor, stored, kind in tensors:
            _declare(writer, tensor, stored, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for values in settings.tensors.values():
            writer.write_tensor_data(values)
        for tensor, stored, kind in tensors:
            source = tensor if tensor in weights.hf_shapes else EMBEDDING
            values = np.asarray(weights.save(source, read), np.float32)
            values = np.ascontiguousarray(_convert_values(values, tensor, row).reshape(stored))
            writer.write_tensor_data(quantize(values, GGMLQuantizationType[kind]))
        writer.close()
        Path(staging).chmod(0o644)
        Path(staging).replace(path)
    finally:
        Path(staging).unlink(missing_ok=True)


def _format(tensor: str, shape: Shape, form: FileType) -> str:
    matrix = any(part in tensor for part in _KEPT_AS_MATRIX)
    is_float32 = any(part in tensor for part in _FLOAT32) and not matrix
    if len(shape) < 2 or is_float32 or tensor.endswith("norm.weight"):
        return "F32"
    kind = form.outer if tensor.startswith(_OUTER) else form.matrices
    return "F16" if kind.startswith("Q") and shape[-1] % 32 else kind


def _convert_values(values: np.ndarray, tensor: str, row: Architecture) -> np.ndarray:
    """Return the values of a file; `files._change` is the inverse."""
    if row.shifted and tensor.endswith("norm.weight"):
        return values + np.float32(1)
    if tensor.endswith(".ssm_a"):
        return -np.exp(values)
    return values


def _declare(writer: Any, tensor: str, shape: Shape, kind: str) -> None:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    form = GGMLQuantizationType[kind]
    elements, size = GGML_QUANT_SIZES[form]
    *rows, columns = shape or (1,)
    in_bytes = (*rows, columns // elements * size)
    if kind in ("F32", "F16"):
        dtype = np.dtype(np.float32 if kind == "F32" else np.float16)
        count = int(np.prod(shape)) * dtype.itemsize
        writer.add_tensor_info(tensor, shape, dtype, count)
        return
    writer.add_tensor_info(
        tensor, in_bytes, np.dtype(np.uint8), int(np.prod(in_bytes)), raw_dtype=form
    )


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool | np.bool_):
        writer.add_bool(key, bool(value))
    elif isinstance(value, int | np.integer):
        (writer.add_uint32 if value >= 0 else writer.add_int32)(key, int(value))
    elif isinstance(value, float | np.floating):
        writer.add_float32(key, float(value))
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
