"""Sinusoidal positions (Vaswani et al. 2017): sines, then cosines, of one position.

Legend: b batch, s sequence, d features.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

# A product of a position below 2^12 and a number of 12 bits is exact in float32.
_HIGH_BITS = np.uint32(0xFFFFF000)


class SinusoidalPositions(nnx.Module):
    """`[sin(p w), cos(p w)]` of a position p. The module has no parameters.

    Args:
        frequencies: w, [d / 2]. With float64, the result has the precision of float32 for
            p < 4096; with float32, the product p w is rounded to float32.
        dtype: dtype of the result.
    """

    def __init__(self, frequencies: np.ndarray, dtype: DTypeLike):
        high = frequencies.astype(np.float32)
        if frequencies.dtype == np.float64:
            high = (high.view(np.uint32) & _HIGH_BITS).view(np.float32)
        self.high = tuple(high.tolist())
        self.low = tuple((frequencies - high).astype(np.float32).tolist())
        self.dtype = dtype

    def __call__(self, position_ids: Int[Array, "b s"]) -> Float[Array, "b s d"]:
        """Return the embeddings of the positions."""
        positions = position_ids.astype(jnp.float32)[..., None]
        large, small = (positions * jnp.asarray(part) for part in (self.high, self.low))
        sin, cos = jnp.sin(large), jnp.cos(large)
        sin_small, cos_small = jnp.sin(small), jnp.cos(small)
        parts = sin * cos_small + cos * sin_small, cos * cos_small - sin * sin_small
        return jnp.concatenate(parts, axis=-1).astype(self.dtype)


def geometric(features: int) -> np.ndarray:
    """Return the frequencies `10000 ** (-2 i / d)` (Marian, Pegasus), [d / 2]."""
    return 10000.0 ** (-np.arange(0, features, 2) / features)


def fairseq(features: int) -> np.ndarray:
    """Return the frequencies `10000 ** (-i / (d / 2 - 1))` (M2M-100), [d / 2], float32."""
    half = features // 2
    step = np.float32(np.log(10000) / max(half - 1, 1))
    exponents = np.arange(half, dtype=np.float32) * -step
    return np.exp(exponents.astype(np.float64)).astype(np.float32)
