"""A key of arrays by their content."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np


def content_key(arrays: Mapping[str, np.ndarray], *more: object) -> bytes:
    """Return 16 bytes that identify arrays by their names, dtypes, shapes and values.

    Args:
        arrays: arrays by name.
        more: further values, which are identified by their text.
    """
    key = hashlib.sha256()  # processors have instructions for it: twice as fast as BLAKE2
    for name, array in sorted(arrays.items()):
        key.update(f"{name} {array.dtype} {array.shape} ".encode())
        key.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    for value in more:
        key.update(f"{value}".encode())
    return key.digest()[:16]
