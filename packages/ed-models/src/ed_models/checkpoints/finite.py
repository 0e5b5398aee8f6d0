"""Whether an array has only finite numbers, at the speed of a copy.

The bits of a float order like a whole number: with the sign bit clear, infinity and NaN are the
largest signed numbers; with the sign bit set, the largest unsigned ones. Two maxima decide.
"""

from __future__ import annotations

import numpy as np

#: Name of a dtype -> bits of its first number that is not finite, the sign bit clear.
_FIRST = {
    "float64": 0x7FF0 << 48,
    "float32": 0x7F80 << 16,
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "float8_e5m2": 0x7C,
    "float8_e4m3fn": 0x7F,
}
_BLOCK = 2**20  # bytes: the second maximum reads from the processor's cache


def is_finite(values: np.ndarray) -> bool:
    """Return whether no number is NaN or infinite; whole numbers always are finite."""
    name, width = values.dtype.name, values.dtype.itemsize
    if name == "float8_e8m0fnu":
        return not (values.view(np.uint8) == 0xFF).any()
    if name not in _FIRST:
        return True
    signed, first = values.view(f"i{width}"), _FIRST[name]
    unsigned, first_negative = values.view(f"u{width}"), first | 1 << 8 * width - 1
    if values.ndim == 0 or values.nbytes <= _BLOCK or not values.flags.c_contiguous:
        parts = [slice(None)] if values.ndim else [()]
    else:
        signed, unsigned = signed.reshape(-1), unsigned.reshape(-1)
        step = _BLOCK // width
        parts = [slice(start, start + step) for start in range(0, values.size, step)]
    return all(
        signed[part].max(initial=0) < first and unsigned[part].max(initial=0) < first_negative
        for part in parts
    )
