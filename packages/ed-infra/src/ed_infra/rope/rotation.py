"""Rotation of queries and keys by their positions, along one axis or several.

M-RoPE has several axes of positions: time, height and width of images and videos. Each axis rotates
a part of the frequencies (Qwen2-VL, Wang et al., 2024). For text, the positions of all axes are
equal, and the result equals ordinary rotary embeddings.

Shapes: `k` head dimension, `r` rotary dimension (`r <= k`), `r2` = r / 2, `s` positions, `h` query
heads, `g` key heads, `a` axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Float, Int

from ed_infra.errors import ConfigError


def angles(
    positions: ArrayLike,
    frequencies: ArrayLike,
    attention_scaling: ArrayLike = 1.0,
    dtype: DTypeLike = jnp.float32,
) -> tuple[Float[jax.Array, "*p r2"], Float[jax.Array, "*p r2"]]:
    """Return cos and sin of positions.

    Args:
        positions: int [...].
        frequencies: float32 [r / 2], or for each position, [..., r / 2].
        attention_scaling: Factor of cos and sin.
        dtype: Dtype of the result; the angles are float32.

    Returns:
        cos and sin, each [..., r / 2].
    """
    turned = jnp.asarray(positions, jnp.float32)[..., None] * jnp.asarray(frequencies, jnp.float32)
    return (
        (jnp.cos(turned) * attention_scaling).astype(dtype),
        (jnp.sin(turned) * attention_scaling).astype(dtype),
    )


def rotate(
    x: Float[jax.Array, "*p k"], cos: jax.Array, sin: jax.Array, interleaved: bool = False
) -> Float[jax.Array, "*p k"]:
    """Rotate the first r dimensions of the last axis; the others are unchanged.

    Args:
        x: [..., k].
        cos: [..., r / 2], broadcast against `x` except for the last axis.
        sin: Same shape as `cos`.
        interleaved: Whether pairs are neighbors (GPT-J) instead of halves (NeoX, Llama).

    Returns:
        An array like `x`, computed in float32.
    """
    r = 2 * cos.shape[-1]
    turning, x_pass = x[..., :r].astype(jnp.float32), x[..., r:]
    cos, sin = cos.astype(jnp.float32), sin.astype(jnp.float32)
    if interleaved:
        a, b = turning[..., 0::2], turning[..., 1::2]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(turning.shape)
    else:
        a, b = jnp.split(turning, 2, axis=-1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    turned = turned.astype(x.dtype)
    return jnp.concatenate([turned, x_pass], axis=-1) if x_pass.shape[-1] else turned


@dataclasses.dataclass(frozen=True)
class RotaryTable:
    """The rotary embedding of a configuration: a function of queries and keys, and its tables.

    `rope(query, key, positions)` rotates both, with heads on the second-last axis. `sin, cos =
    rope` unpacks the tables, each [s, r / 2], in the table's dtype.

    Attributes:
        axis: The axis of positions for each frequency (`axis_of_frequency`), for models with
        several
            axes; positions are then [a, ..., s].
    """

    frequencies: np.ndarray
    attention_scaling: float = 1.0
    length: int = 0
    interleaved: bool = False
    dtype: DTypeLike = jnp.float32
    axis: np.ndarray | None = None

    def tables(self) -> tuple[jax.Array, jax.Array]:
        """Return sin and cos of positions 0 … length - 1, each [s, r / 2]."""
        cos, sin = angles(
            jnp.arange(self.length), self.frequencies, self.attention_scaling, self.dtype
        )
        return sin, cos

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.tables())

    def __call__(
        self, query: jax.Array, key: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Rotate query and key.

        Args:
            query: [..., s, h, k].
            key: [..., s, g, k].
            positions: int [..., s], or [a, ..., s] for several axes.
        """
        cos, sin = angles(positions, self.frequencies, self.attention_scaling)
        if self.axis is not None and jnp.ndim(positions) == query.ndim - 1:
            cos, sin = select_axis(cos, self.axis), select_axis(sin, self.axis)
        cos, sin = cos[..., None, :], sin[..., None, :]
        return (
            rotate(query, cos, sin, self.interleaved),
            rotate(key, cos, sin, self.interleaved),
        )


def axis_of_frequency(
    sections: Sequence[int], count: int, interleaved: bool = False
) -> Int[np.ndarray, " r2"]:
    """Return the axis of each frequency: int [r2].

    Args:
        sections: Number of frequencies of each axis (`rope_parameters["mrope_section"]`).
        count: r2.
        interleaved: Whether axes alternate, t h w t h w …, with the remaining frequencies on the
            first axis (Qwen3-VL, `rope_parameters["mrope_interleaved"]`), instead of following each
            other (Qwen2-VL, GLM-4V).

    Raises:
        ConfigError: The sum of the sections is not the number of frequencies.
    """
    if sum(sections) != count:
        raise ConfigError(
            f"mrope_section {list(sections)} adds up to {sum(sections)}, but there are {count} "
            "frequencies (half of the rotary dimension): the two must be equal"
        )
    if not interleaved:
        return np.repeat(np.arange(len(sections)), sections)
    axis = np.zeros(count, int)
    for i, size in enumerate(sections[1:], start=1):
        axis[i : size * len(sections) : len(sections)] = i
    return axis


def select_axis(
    values: Float[jax.Array, "a *p r2"], axis: Int[np.ndarray, " r2"]
) -> Float[jax.Array, "*p r2"]:
    """Select the value (angle, cos or sin) of each frequency from its axis."""
    axis_values = [values[i][..., axis == i] for i in range(values.shape[0])]
    order = np.argsort(np.concatenate([np.flatnonzero(axis == i) for i in range(len(axis_values))]))
    return jnp.concatenate(axis_values, axis=-1)[..., order]


def get_section_axes(parameters: Mapping[str, Any], count: int) -> Int[np.ndarray, " r2"] | None:
    """Return `axis_of_frequency` of rope parameters, or None without sections.

    The rope type `axial` has two equal sections, of rows and columns of an image.
    """
    if parameters.get("rope_type") == "axial":
        return axis_of_frequency((count // 2, count - count // 2), count)
    sections = parameters.get("mrope_section")
    if not sections:
        return None
    return axis_of_frequency(sections, count, bool(parameters.get("mrope_interleaved")))
