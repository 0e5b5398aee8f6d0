"""Intermediate results with a name: what remat policies choose from, and what a mesh pins."""

from __future__ import annotations

from typing import Any

import jax
from ed_infra.sharding import constrain
from jax.ad_checkpoint import checkpoint_name


def named(x: jax.Array, name: str, axes: tuple[str | None, ...], config: Any = None) -> jax.Array:
    """Name an intermediate result of a layer.

    Args:
        x: any array.
        name: one of `gradient_checkpointing_targets`.
        axes: what its dimensions mean (`ed_infra.axes.ACTIVATION_AXES`); with
            `use_sharding_constraint` the compiler is told to split them so. Without, it is told so
            between layers only.
        config: the model's; None leaves placement to the compiler.
    """
    if config is not None and config.use_sharding_constraint:
        x = constrain(x, axes, config)
    return checkpoint_name(x, name)
