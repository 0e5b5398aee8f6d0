"""Rotary positions with several axes: time, height and width of images and videos (M-RoPE).

Each axis turns its own share of the frequencies (Qwen2-VL, Wang et al., 2024). Where the positions
of all axes are equal, as in text, the result is that of ordinary positions.

Shapes: `a` axes, `r2` = rotary dimension / 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from ed_infra.errors import ConfigError


def axis_of_frequency(
    sections: Sequence[int], count: int, interleaved: bool = False
) -> Int[np.ndarray, " r2"]:
    """Return which axis turns each frequency: int [r2].

    Args:
        sections: frequencies of each axis (`rope_parameters["mrope_section"]`).
        count: r2.
        interleaved: axes take turns, t h w t h w …, and what is left belongs to the first
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
