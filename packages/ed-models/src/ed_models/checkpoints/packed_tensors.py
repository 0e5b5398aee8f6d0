"""Checkpoints whose tensors are packed: codes of few bits with scales, read as plain numbers.

`quantization_config` of `config.json` defines the packing. `unpack_tensors` returns a view of the
files in which each packed tensor has its name, its shape and its values; the codes and scales
behind it are hidden. A slice is unpacked when it is read, and converted to the parameter's dtype
then: nothing but that slice is in memory.

A further format is a file of `ed_models.checkpoints.packing` and an entry of `_READERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import CheckpointError, did_you_mean
from ed_infra.logging import get_logger, once

from ed_models.checkpoints.packing.awq import awq
from ed_models.checkpoints.packing.bitsandbytes import bitsandbytes
from ed_models.checkpoints.packing.compressed import compressed_tensors
from ed_models.checkpoints.packing.float8 import float8
from ed_models.checkpoints.packing.gptq import gptq
from ed_models.checkpoints.packing.mxfp4 import mxfp4
from ed_models.checkpoints.packing.packed import Packed
from ed_models.checkpoints.quantized_tensors import METHOD
from ed_models.checkpoints.tensor_files import Computed, TensorFiles

logger = get_logger(__name__)

#: `quant_method` of Hugging Face -> what reads the tensors that are packed so.
_READERS: Mapping[str, Callable[[TensorFiles, Mapping[str, Any]], Iterator[Packed]]] = {
    "awq": awq,
    "bitsandbytes": bitsandbytes,
    "compressed-tensors": compressed_tensors,
    "fp8": float8,
    "gptq": gptq,
    "mxfp4": mxfp4,
}

#: Last parts of the names of what activations and caches would be rounded by.
_ACTIVATIONS = frozenset(
    {
        "activation_scale",
        "input_global_scale",
        "input_scale",
        "input_zero_point",
        "k_scale",
        "k_zero_point",
        "output_scale",
        "output_zero_point",
        "q_scale",
        "v_scale",
        "v_zero_point",
    }
)


def unpack_tensors(
    files: TensorFiles, config: EasyDeLBaseConfig
) -> tuple[TensorFiles, EasyDeLBaseConfig]:
    """Return the files as plain numbers, and the configuration of a model that has such.

    Scales of activations are ignored, with one warning: products are computed in
    the model's dtype.

    Args:
        config: its `quantization_config` describes the packing, if tensors are packed.

    Raises:
        CheckpointError: the packing is not known, or scales do not fit their tensors.
    """
    settings = config.quantization_config
    if not isinstance(settings, Mapping) or "quant_method" not in settings:
        return files, config
    return read_plain_tensors(files, settings), config.replace(quantization_config=None)


def read_plain_tensors(files: TensorFiles, settings: Mapping[str, Any]) -> TensorFiles:
    """Return the files as plain numbers; see `unpack_tensors`.

    Args:
        settings: the `quantization_config` of config.json.
    """
    method = settings["quant_method"]
    if method == METHOD:  # quantized matrices of this project, which are not unpacked
        return files
    if method not in _READERS:
        raise CheckpointError(
            f"quantization_config of config.json has quant_method={method!r}, a packing that is "
            f"not read{did_you_mean(str(method), _READERS)} (known: {', '.join(_READERS)}): load "
            "the checkpoint that was not quantized, or unpack it once with transformers "
            "(model.dequantize(), then save_pretrained)"
        )
    packed = {tensor.name: tensor for tensor in _READERS[method](files, settings)}
    idle = {name for name in files if name.rpartition(".")[-1] in _ACTIVATIONS}
    if idle:
        once(
            logger,
            f"{files.directory}: {len(idle)} scales of activations ({min(idle)}, …) are not read: "
            "only weights are quantized, and products are computed in the model's dtype",
        )
    hidden = {part for tensor in packed.values() for part in tensor.parts} | idle
    plain_files = files.rename_tensors(dict.fromkeys(hidden))
    computed = {n: Computed(tensor.entry, tensor.at) for n, tensor in packed.items()}
    return plain_files.add_tensors(computed)
