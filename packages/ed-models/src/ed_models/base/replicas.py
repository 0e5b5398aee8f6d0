"""Copies of a model on other meshes, for data-parallel replicas."""

from __future__ import annotations

from typing import TypeVar

import jax
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.sharding.mesh import part_on
from ed_layers.attention.mechanism import change_configurations
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

M = TypeVar("M", bound=nnx.Module)


def place_on_mesh(model: M, mesh: Mesh) -> M:
    """Return a copy of a model on another mesh with the same axes.

    Arrays with shards on the devices of `mesh` are shared with `model`, so a slice of the model's
    mesh costs no memory. Other arrays are copied.

    Args:
        model: a model on any mesh.
        mesh: the new mesh, with the axis names of the model's mesh.

    Returns:
        A model with separate configurations.

    Raises:
        ConfigError: the configuration does not allow the mesh.
    """
    graphdef, state = nnx.split(model)
    copy = nnx.merge(graphdef, jax.tree.map(lambda x: _move_array(x, mesh), state))
    change_configurations(copy, lambda config: _replace_mesh(config, mesh))
    return copy


def _move_array(array: jax.Array, mesh: Mesh) -> jax.Array:
    old = array.sharding if isinstance(array, jax.Array) else None
    spec = old.spec if isinstance(old, NamedSharding) else PartitionSpec()
    sharding = NamedSharding(mesh, spec)
    return jax.device_put(part_on(array, sharding) if old is not None else array, sharding)


def _replace_mesh(config: EasyDeLBaseConfig, mesh: Mesh) -> EasyDeLBaseConfig:
    """Return a copy of a configuration and its nested configurations with a mesh."""
    copy = config.replace()
    nested = [one for one in copy.__dict__.values() if isinstance(one, EasyDeLBaseConfig)]
    for one in (copy, *nested):
        one.set_model_mesh(mesh)
    return copy
