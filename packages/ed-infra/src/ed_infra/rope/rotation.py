"""Rotation of queries and keys by their positions, along one axis or several.

M-RoPE has several axes of positions, for time, height and width of images and videos; each turns
its own share of the frequencies (Qwen2-VL, Wang et al., 2024). Where the positions of all axes are
equal, as in text, the result is that of ordinary positions.

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
        frequencies: float32 [r / 2], or of each position, [..., r / 2].
        attention_scaling: factor of both.
        dtype: of the result; the angles themselves are float32.

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
    """Turn the first r dimensions of the last axis; the rest pass unchanged.

    Args:
        x: [..., k].
        cos: [..., r / 2], broadcast against `x` but for the last axis.
        sin: as `cos`.
        interleaved: pairs are neighbours (GPT-J) instead of the halves (NeoX, Hugging Face Llama).

    Returns:
        As `x`; computed in float32.
    """
    r = 2 * cos.shape[-1]
    turning, rest = x[..., :r].astype(jnp.float32), x[..., r:]
    cos, sin = cos.astype(jnp.float32), sin.astype(jnp.float32)
    if interleaved:
        a, b = turning[..., 0::2], turning[..., 1::2]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(turning.shape)
    else:
        a, b = jnp.split(turning, 2, axis=-1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    turned = turned.astype(x.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned


@dataclasses.dataclass(frozen=True)
class RotaryTable:
    """Rotary embedding of one configuration: callable on queries and keys, or `sin, cos` tables.

    `rope(query, key, positions)` turns both, with heads on the axis before the last;
    `sin, cos = rope` unpacks the tables, each [s, r / 2], in the table's dtype.

    Attributes:
        axis: which axis of positions turns each frequency (`axis_of_frequency`), where a model
            has several; positions are then [a, ..., s].
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
        """Turn query and key.

        Args:
            query: [..., s, h, k].
            key: [..., s, g, k].
            positions: int [..., s], or [a, ..., s] where there are several axes.
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
    """Return which axis turns each frequency: int [r2].

    Args:
        sections: frequencies of each axis (`rope_parameters["mrope_section"]`).
        count: r2.
        interleaved: axes take turns, t h w t h w …, and the rest belongs to the first one
            (Qwen3-VL, `rope_parameters["mrope_interleaved"]`); else one after another (Qwen2-VL,
            GLM-4V).

    Raises:
        ConfigError: the sections do not add up to the frequencies.
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
    """Take each frequency's value (angle, cos or sin) from the axis that turns it."""
    chosen = [values[i][..., axis == i] for i in range(values.shape[0])]
    order = np.argsort(np.concatenate([np.flatnonzero(axis == i) for i in range(len(chosen))]))
    return jnp.concatenate(chosen, axis=-1)[..., order]


def sections_of(parameters: Mapping[str, Any], count: int) -> Int[np.ndarray, " r2"] | None:
    """Return `axis_of_frequency` of rope parameters, or None where they have no sections."""
    sections = parameters.get("mrope_section")
    if not sections:
        return None
    return axis_of_frequency(sections, count, bool(parameters.get("mrope_interleaved")))
