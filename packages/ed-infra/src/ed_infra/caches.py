"""Arrays that a configuration precomputes: rotary tables, masks."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class ModuleCaches(nnx.Cache):
    """A precomputed array, usable wherever an array is.

    As an attribute of a module it is no parameter: optimizers and checkpoints of parameters do not
    see it (`module.graphother` does).
    """


def on_mesh(value: Any, mesh: Mesh) -> ModuleCaches:
    """Put an array whole on every device of a mesh."""
    if mesh.size > 1:
        value = jax.device_put(value, NamedSharding(mesh, PartitionSpec()))
    with nnx.use_eager_sharding(False):
        return ModuleCaches(value)
