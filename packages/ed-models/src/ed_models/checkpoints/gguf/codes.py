"""The blocks of GGUF files as codes with scales, which products use without decoded values.

The value of a code is `(code - zero) * scale`, as in `ed_layers.quantization.stored`. Formats
without an entry in `BLOCKS` are decoded. The layouts are those of ggml-common.h of llama.cpp.

Legend: b blocks, y bytes of a block, k codes of a block, s scales of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8

_Blocks = UInt8[np.ndarray, "*lead b y"]
_Scales = Float[np.ndarray, "*lead b s"]

#: Values of the codes of IQ4_NL.
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


@dataclass(frozen=True)
class BlockForm:
    """The codes in the blocks of one format.

    Attributes:
        codes: blocks -> codes [.., b, k]: int8, or uint8 below 16 if they fit into 4 bits.
        scales: blocks -> scales [.., b, s], and what is subtracted from each value, or None.
        group: number of codes with the same scale.
        small: whether 4 bits hold the codes.
        zero: code of the value 0, in formats that subtract nothing from the values.
    """

    codes: Callable[[_Blocks], Int[np.ndarray, "*lead b k"]]
    scales: Callable[[_Blocks], tuple[_Scales, _Scales | None]]
    group: int = 32
    small: bool = False
    zero: int = 0


def _half(blocks: _Blocks, start: int) -> Float[np.ndarray, "*lead b one"]:
    """Return the float16 number at a byte, in float32."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(blocks: _Blocks, start: int, count: int) -> UInt8[np.ndarray, "*lead b k"]:
    """Return the codes of runs of `count` bytes: first the low halves of a run, then the high."""
    runs = blocks[..., start:].reshape(*blocks.shape[:-1], -1, 1, count)
    codes = runs >> np.array([0, 4], np.uint8)[:, None] & 15
    return codes.reshape(*blocks.shape[:-1], -1)


def _one_scale(blocks: _Blocks) -> tuple[_Scales, None]:
    return _half(blocks, 0), None


def _scale_and_least(blocks: _Blocks) -> tuple[_Scales, _Scales]:
    return _half(blocks, 0), -_half(blocks, 2)


def _five_bits(start: int) -> Callable[[_Blocks], Int[np.ndarray, "*lead b k"]]:
    """Codes with the fifth bits in four bytes at `start`, before the others."""

    def codes(blocks: _Blocks) -> Int[np.ndarray, "*lead b k"]:
        fifth = np.unpackbits(blocks[..., start : start + 4], axis=-1, bitorder="little")
        return (_nibbles(blocks, start + 4, 16) | fifth << 4).astype(np.int8)

    return codes


def _six_bit_scales(blocks: _Blocks) -> tuple[_Scales, _Scales]:
    """Return the scales and subtracted numbers of Q4_K and Q5_K: six bits each, in 12 bytes."""
    packed = blocks[..., 4:16]
    low, least, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scale = np.concatenate([low & 63, high & 15 | low >> 6 << 4], -1).astype(np.float32)
    offset = np.concatenate([least & 63, high >> 4 | least >> 6 << 4], -1).astype(np.float32)
    return _half(blocks, 0) * scale, _half(blocks, 2) * offset


def _q5_k(blocks: _Blocks) -> Int[np.ndarray, "*lead b k"]:
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    fifth = (blocks[..., None, 16:48] >> shifts & 1).reshape(*blocks.shape[:-1], -1)
    return (_nibbles(blocks, 48, 32) | fifth << 4).astype(np.int8)


def _q6_k(blocks: _Blocks) -> Int[np.ndarray, "*lead b k"]:
    low = _nibbles(blocks[..., :128], 0, 64)
    pairs = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32)
    high = pairs >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    return (low | high.reshape(low.shape) << 4).astype(np.int8) - np.int8(32)


def _q6_k_scales(blocks: _Blocks) -> tuple[_Scales, None]:
    return _half(blocks, 208) * blocks[..., 192:208].view(np.int8).astype(np.float32), None


#: Format of a GGUF file -> its codes. The other formats are decoded.
BLOCKS: Mapping[str, BlockForm] = {
    "Q8_0": BlockForm(lambda blocks: blocks[..., 2:].view(np.int8), _one_scale),
    "Q4_0": BlockForm(lambda blocks: _nibbles(blocks, 2, 16), _one_scale, small=True, zero=8),
    "Q4_1": BlockForm(lambda blocks: _nibbles(blocks, 4, 16), _scale_and_least, small=True),
    "Q5_0": BlockForm(lambda blocks: _five_bits(2)(blocks) - np.int8(16), _one_scale),
    "Q5_1": BlockForm(_five_bits(4), _scale_and_least),
    "Q4_K": BlockForm(lambda blocks: _nibbles(blocks, 16, 32), _six_bit_scales, small=True),
    "Q5_K": BlockForm(_q5_k, _six_bit_scales),
    "Q6_K": BlockForm(_q6_k, _q6_k_scales, group=16),
    "IQ4_NL": BlockForm(lambda blocks: _IQ4[_nibbles(blocks, 2, 16)], _one_scale),
}
#: Formats that subtract a number from each value.
SHIFTED = frozenset({"Q4_1", "Q5_1", "Q4_K", "Q5_K"})


class CodeForm(NamedTuple):
    """The arrays that hold the codes of one matrix of a model.

    Attributes:
        small: whether two codes share a byte; a code is in int8 otherwise.
        group: number of codes with the same scale.
        zero: dtype of the zeros: uint8, float32 or None.
    """

    small: bool
    group: int
    zero: str | None

    @property
    def format(self) -> str:
        """Name of the format in `ed_layers.quantization.formats`."""
        return "int4" if self.small else "int8"


def common_form(formats: Collection[str]) -> CodeForm | None:
    """Return arrays that hold the codes of tensors of these formats exactly; None if a format is
    decoded."""
    if not formats or not set(formats) <= BLOCKS.keys():
        return None
    forms = [BLOCKS[name] for name in formats]
    small = all(form.small for form in forms)
    zero = "float32" if SHIFTED & set(formats) else "uint8" if small else None
    return CodeForm(small, min(form.group for form in forms), zero)


def part_of_blocks(blocks: _Blocks, name: str, code_form: CodeForm, part: str) -> np.ndarray:
    """Return one array of the codes in the blocks of rows [.., columns].

    Args:
        blocks: the blocks of the rows.
        name: their format, a key of `BLOCKS`.
        code_form: the arrays, see `common_form`.
        part: `codes`, `scale` or `zero`.

    Returns:
        `codes` [.., columns], or [.., columns / 2] with an even column in the lower four bits;
        `scale` [.., columns / group], float32; `zero` of the same shape in the dtype of the form.
    """
    form = BLOCKS[name]
    lead = blocks.shape[:-2]
    scale, offset = (None if x is None else x.reshape(*lead, -1) for x in form.scales(blocks))
    assert scale is not None
    negative = form.zero != 0 and not code_form.small  # int8 has codes below 0
    zero, flat = np.full_like(scale, 0 if negative else form.zero), None
    if offset is not None:
        scale, zero, flat = _with_zeros(scale, offset)
    if part != "codes":
        values = np.repeat(scale if part == "scale" else zero, form.group // code_form.group, -1)
        return values if part == "scale" else values.astype(code_form.zero)
    codes = form.codes(blocks).reshape(*lead, -1, form.group)
    if flat is not None:
        codes = np.where(flat[..., None], codes.dtype.type(0), codes)
    if negative:
        codes = codes.view(np.int8) - np.int8(form.zero)
    codes = codes.reshape(*lead, -1)
    if code_form.small:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    return codes.view(np.uint8 if code_form.small else np.int8)


def _with_zeros(scale: np.ndarray, offset: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return scales and zeros of the values `code * scale - offset`, and which groups are flat: all
    their values are equal, and have the code 0 with the zero 1."""
    with np.errstate(all="ignore"):
        zero = offset / scale
    flat = (offset != 0) & ~np.isfinite(zero)
    zero = np.where(flat, np.float32(1), np.where(offset == 0, np.float32(0), zero))
    return np.where(flat, offset, scale), zero, flat
