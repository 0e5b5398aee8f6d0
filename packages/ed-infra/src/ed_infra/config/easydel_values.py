"""Values of `config.json` that EasyDeL writes, and their form here.

EasyDeL writes its execution fields beside those of the architecture. Some describe the machine that
wrote the file, and EasyDeL resets them when it loads the file. Others have further keys, or name a
mechanism that this project does not need.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

from ed_infra.config.fields import FIELDS
from ed_infra.enums import AVAILABLE_ATTENTION_MECHANISMS, MECHANISM_ALIASES
from ed_infra.logging import get_logger, once
from ed_infra.specs import (
    QUANTIZATION_ALIASES,
    QUANTIZATION_FIELD_ALIASES,
    QUANTIZATION_FORMATS,
    EasyDeLQuantizationConfig,
)

logger = get_logger(__name__)

#: Fields that describe the machine of the file. `from_pretrained` and run files set them.
MACHINE_FIELDS = (
    *("backend", "platform", "sharding_axis_dims", "sharding_axis_names"),
    "sharding_dcn_axis_dims",
)
#: Fields of an operation in EasyDeL's file -> fields here. The others tune kernels of EasyDeL.
_BLOCKS = {"q_blocksize": "block_q", "kv_blocksize": "block_k"}
#: Fields of a quantization that only select a kernel.
_KERNEL_FIELDS = ("jax_native", "runtime_dtype")
_AFFINE = {4: "int4", 8: "int8"}
#: Fields of Cohere 2 that Cohere lacks.
_COHERE2_FIELDS = ("layer_types", "sliding_window_pattern")
_SIZES = {"mxfp4": 32, "mxfp8": 32}


def convert_easydel_values(stored: Mapping[str, Any], location: str) -> dict[str, Any]:
    """Return the keys of a file of EasyDeL with values that this project accepts.

    Nested configurations of a text model or an encoder are converted, too. One line of the log
    names the values that were reset.

    Args:
        stored: the content of the file.
        location: the path of the file.
    """
    remarks: dict[str, None] = {}
    fields = _convert(stored, remarks)
    if remarks:
        once(logger, f"{location}, which EasyDeL wrote: {'; '.join(remarks)}")
    return fields


def _convert(stored: Mapping[str, Any], remarks: dict[str, None]) -> dict[str, Any]:
    fields = dict(stored)
    if fields.get("model_type") == "cohere" and any(fields.get(name) for name in _COHERE2_FIELDS):
        fields["model_type"] = "cohere2"  # EasyDeL writes the type of Cohere for Cohere 2
    if fields.get("image_token_index") is not None:
        fields.pop("image_token_id", None)  # of Gemma 3: a default, which EasyDeL does not read
    reset = [name for name in MACHINE_FIELDS if _is_changed(name, fields.pop(name, None))]
    if "sharding_axis_names" in reset:
        fields.pop("partition_axis", None)  # it names axes of this mesh
    if reset:
        remarks[f"{', '.join(reset)} describe another machine and are reset"] = None
    for name in ("fcm_min_ratio", "fcm_max_ratio"):
        if _is_number(fields.get(name)) and fields[name] < 0:  # EasyDeL's word for no masking
            fields[name] = 0.0
    known_mechanisms = (*typing.get_args(AVAILABLE_ATTENTION_MECHANISMS), *MECHANISM_ALIASES)
    for name in ("attn_mechanism", "decode_attn_mechanism"):
        value = fields.get(name)
        if isinstance(value, str) and value and value not in known_mechanisms:
            remarks[f"{name} {value[:80]} is a mechanism of EasyDeL, and auto takes its place"] = (
                None
            )
            fields[name] = "auto"
    operations = fields.get("operation_configs")
    if isinstance(operations, Mapping):
        blocks = {
            operation: _convert_operation(settings)
            for operation, settings in operations.items()
            if operation in known_mechanisms
        }
        fields["operation_configs"] = blocks or None
        remarks["operation_configs keep only the blocks of queries and keys"] = None
    for name in ("quantization_config", "kv_cache_quantization_config"):
        value = fields.get(name)
        if isinstance(value, Mapping) and "quant_method" not in value:
            fields[name] = _convert_quantization(name, value, remarks)
    for name, value in fields.items():
        if isinstance(value, Mapping) and "model_type" in value:
            fields[name] = _convert(value, remarks)
    return fields


def _is_changed(name: str, value: object) -> bool:
    """Return whether a field has another value than that of a file without it."""
    if value is None or value == "":
        return False
    value = tuple(value) if isinstance(value, list) else value
    return value != FIELDS[name].default


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _convert_operation(settings: object) -> dict[str, Any]:
    """Return the sizes of the blocks of an operation."""
    stored = settings if isinstance(settings, Mapping) else {}
    forward = stored.get("fwd_params")
    sizes = {**stored, **(forward if isinstance(forward, Mapping) else {})}
    names = {**_BLOCKS, **{name: name for name in _BLOCKS.values()}}
    return {
        names[name]: value
        for name, value in sizes.items()
        if name in names and type(value) is int and value >= 1
    }


def _convert_quantization(
    field: str, stored: Mapping[str, Any], remarks: dict[str, None]
) -> dict[str, Any] | None:
    """Return the settings of a format that exists here; None for another one.

    The weights in a folder of EasyDeL are plain: its settings select the format for a later load.
    """
    settings = {
        name: value
        for name, value in stored.items()
        if name in EasyDeLQuantizationConfig.__dataclass_fields__
        or name in QUANTIZATION_FIELD_ALIASES
    }
    dtype, bits = stored.get("dtype", "nf4"), stored.get("bits")
    if dtype in ("affine", "int8") and bits is not None:
        dtype = _AFFINE.get(bits, f"{dtype} of {bits} bits") if type(bits) is int else dtype
    dtype = QUANTIZATION_ALIASES.get(dtype, dtype) if isinstance(dtype, str) else str(dtype)
    if dtype not in QUANTIZATION_FORMATS:
        remarks[
            f"{field} {dtype[:80]} is no format here and is dropped; quantization_config= of "
            f"from_pretrained selects one of {', '.join(QUANTIZATION_FORMATS)}"
        ] = None
        return None
    if any(stored.get(name) for name in _KERNEL_FIELDS):
        remarks[f"{field}: {', '.join(_KERNEL_FIELDS)} select kernels of EasyDeL"] = None
    if settings.get("group_size") != _SIZES.get(dtype) and dtype in _SIZES:
        settings["group_size"] = _SIZES[dtype]
    return {**settings, "dtype": dtype}
