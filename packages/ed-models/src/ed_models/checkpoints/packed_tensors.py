"""Checkpoints whose tensors are packed: codes of few bits with scales, read as plain numbers.

`config.json` says by `quantization_config` how. `unpacked` gives a view of the files in which each
packed tensor has its name, its shape and its values; the codes and scales behind it are hidden. A
slice is unpacked when it is read, and converted to the parameter's dtype then: nothing but that
slice is in memory.

A further format is an entry of `READERS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import CheckpointError, did_you_mean

from ed_models.checkpoints.tensor_files import Computed, Index, TensorEntry, TensorFiles

#: Values of a 4-bit number E2M1: sign, two bits of exponent, one of mantissa.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: Numbers that share a scale in MXFP4.
MX_BLOCK = 32

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Packed:
    """A tensor that is made of others.

    Attributes:
        name: of the tensor.
        entry: what it looks like: shape and format of its values.
        parts: names of the tensors that it is made of, or that only its packing needs.
        read: its values at slices of each dimension.
    """

    name: str
    entry: TensorEntry
    parts: tuple[str, ...]
    read: Callable[[Slices], np.ndarray]

    def at(self, index: Index) -> np.ndarray:
        """Its values at an index."""
        rest = len(self.entry.shape) - len(index)
        slices = [slice(i, i + 1) if isinstance(i, int) else i for i in index]
        values = self.read((*slices, *(slice(None),) * rest))
        return values[tuple(0 if isinstance(i, int) else slice(None) for i in index)]


def unpacked(
    files: TensorFiles, config: EasyDeLBaseConfig
) -> tuple[TensorFiles, EasyDeLBaseConfig]:
    """Return the files as plain numbers, and the configuration of a model that has such.

    Args:
        config: its `quantization_config` says how tensors are packed, if they are.

    Raises:
        CheckpointError: the packing is not known, or scales do not fit their tensors.
    """
    settings = config.quantization_config
    if not isinstance(settings, Mapping) or "quant_method" not in settings:
        return files, config
    method = settings["quant_method"]
    if method not in READERS:
        raise CheckpointError(
            f"quantization_config of config.json says quant_method={method!r}, a packing that is "
            f"not read{did_you_mean(str(method), READERS)} (known: {', '.join(READERS)}): load the "
            "checkpoint that was not quantized, or unpack it once with transformers "
            "(model.dequantize(), then save_pretrained)"
        )
    packed = {tensor.name: tensor for tensor in READERS[method](files, settings)}
    hidden = {part for tensor in packed.values() for part in tensor.parts}
    plain = files.renamed(dict.fromkeys(hidden))
    computed = {n: Computed(tensor.entry, tensor.at) for n, tensor in packed.items()}
    return plain.joined(computed), config.replace(quantization_config=None)


def fp8_blocks(files: TensorFiles, settings: Mapping[str, Any]) -> Iterator[Packed]:
    """Float8 with a float32 scale for each block of a matrix, or for all of it (DeepSeek-V3).

    `x.weight` [.., o, i] is float8, `x.weight_scale_inv` [.., ceil(o / 128), ceil(i / 128)] what
    the values are multiplied by; `weight_block_size` of the settings says how large blocks are,
    None one scale for the tensor. Scales may be E8M0, exponents alone.
    """
    block = settings.get("weight_block_size")
    suffix = "_scale_inv"
    scaled = {name.removesuffix(suffix): name for name in files if name.endswith(suffix)}
    for name, scale in scaled.items():
        if name not in files:
            raise CheckpointError(f"{scale} is a scale of {name}, which is not in the checkpoint")
        shape, grid = files[name].shape, files[scale].shape
        fits = grid == grid_of(shape, block) if block else math.prod(grid) == 1
        if not fits:
            raise CheckpointError(
                f"{scale} is {list(grid)}, but {name} {list(shape)} has blocks of "
                f"{block or 'any size'} (weight_block_size), so there should be "
                f"{list(grid_of(shape, block)) if block else 'one scale'}"
            )
        # What activations are scaled by, where products are computed in 8 bits.
        layer = name.removesuffix(".weight")
        others = {f"{layer}.activation_scale", f"{layer}.input_scale"} & files.keys()
        read = partial(read_fp8, files, name, scale, block)
        yield Packed(name, replace(files[name], format="F32"), (scale, *others), read)
    bare = [n for n, e in files.items() if e.format.startswith("F8_E4") and n not in scaled]
    if bare:
        raise CheckpointError(
            f"{len(bare)} tensors are float8 without a scale ({bare[0]}_scale_inv): the checkpoint "
            "is not whole; download or save it again"
        )


def read_fp8(
    files: TensorFiles, name: str, scale: str, block: Sequence[int] | None, index: Slices
) -> np.ndarray:
    """Float32 values of a slice of one tensor."""
    values = files.read(name, index).astype(np.float32)
    scales = exponents(files.read(scale)).astype(np.float32)
    if not block:
        return values * scales.reshape(())
    rows, columns = (
        np.arange(size)[part] // side
        for size, part, side in zip(files[name].shape[-2:], index[-2:], block, strict=True)
    )
    values *= scales[index[:-2]][..., rows[:, None], columns]
    return values


def grid_of(shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """How many scales a tensor [.., o, i] has along each dimension."""
    sides = (-(-n // b) for n, b in zip(shape[-2:], block, strict=True))
    return (*shape[:-2], *sides)


def exponents(scales: np.ndarray) -> np.ndarray:
    """Scales that are stored as bytes are exponents with a bias of 127."""
    if scales.dtype != np.uint8:
        return scales
    return scales.view(ml_dtypes.float8_e8m0fnu)


def mxfp4(files: TensorFiles, settings: Mapping[str, Any]) -> Iterator[Packed]:
    """Blocks of 32 numbers E2M1 with an exponent each (gpt-oss; OCP Microscaling Formats 2023).

    `x_blocks` [.., o, i / 32, 16] has two numbers in a byte, the lower bits first, `x_scales`
    [.., o, i / 32] the exponents with a bias of 127; together they are `x` [.., i, o].
    """
    suffix = "_blocks"
    for blocks in [name for name in files if name.endswith(suffix)]:
        name = blocks.removesuffix(suffix)
        scales = f"{name}_scales"
        shape = files[blocks].shape
        if scales not in files or files[scales].shape != shape[:-1] or shape[-1] * 2 != MX_BLOCK:
            what = list(files[scales].shape) if scales in files else "not there"
            raise CheckpointError(
                f"{blocks} is {list(shape)} and {scales} {what}: MXFP4 has blocks "
                f"[.., {MX_BLOCK // 2}] and a scale for each"
            )
        *lead, o, count, _ = shape
        entry = replace(files[blocks], format="BF16", shape=(*lead, count * MX_BLOCK, o))
        yield Packed(name, entry, (blocks, scales), partial(read_mxfp4, files, blocks, scales))


def read_mxfp4(files: TensorFiles, blocks: str, scales: str, index: Slices) -> np.ndarray:
    """Values of a slice [.., i, o] of one tensor, bfloat16."""
    *before, along, rows = index
    wanted = range(files[scales].shape[-1] * MX_BLOCK)[along]
    first, last = min(wanted, default=0) // MX_BLOCK, max(wanted, default=-1) // MX_BLOCK
    at = (*before, rows, slice(first, last + 1))
    values = numbers_of(files.read(blocks, at), files.read(scales, at))
    return values[..., np.asarray(wanted, int) - first * MX_BLOCK].swapaxes(-1, -2)


def numbers_of(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Numbers of MXFP4, bfloat16 [.., n * 32], which holds them exactly.

    Args:
        blocks: uint8 [.., n, 16].
        scales: uint8 [.., n].
    """
    signed = np.array([*E2M1, *(-x for x in E2M1)], np.float32)
    codes = np.arange(256)
    pairs = np.stack([signed[codes & 15], signed[codes >> 4]], axis=-1)
    out = np.empty((*blocks.shape[:-1], MX_BLOCK), ml_dtypes.bfloat16)
    # One matrix at a time: the float32 in between is four times as large as the result may be.
    for at in np.ndindex(blocks.shape[:-3]):
        factor = exponents(scales[at]).astype(np.float32)[..., None]
        values = pairs[blocks[at]].reshape(*blocks[at].shape[:-1], MX_BLOCK)
        out[at] = (values * factor).astype(ml_dtypes.bfloat16)
    return out.reshape(*blocks.shape[:-2], blocks.shape[-2] * MX_BLOCK)


#: `quant_method` of Hugging Face -> what reads the tensors that are packed so.
READERS: Mapping[str, Callable[[TensorFiles, Mapping[str, Any]], Iterator[Packed]]] = {
    "fp8": fp8_blocks,
    "mxfp4": mxfp4,
}
