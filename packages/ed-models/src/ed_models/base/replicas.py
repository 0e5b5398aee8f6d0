"""A model on other devices: what a mesh holds several times becomes several models."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.sharding.submesh import part_on
from ed_layers.projections.embed import Embed
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ed_models.base.module import EasyDeLBaseModule

M = TypeVar("M", bound=nnx.Module)


def on_mesh(model: M, mesh: Mesh) -> M:
    """The same model on another mesh with the same axes.

    Arrays whose parts lie on the devices of `mesh` are shared with `model`, so that a slice of its
    own mesh costs no memory; others are copied there.

    Args:
        model: on any mesh.
        mesh: where to; its axes have the names of the model's.

    Returns:
        a model with configurations of its own.

    Raises:
        ConfigError: the configuration cannot have such a mesh.
    """
    graphdef, state = nnx.split(model)
    copy = nnx.merge(graphdef, jax.tree.map(lambda x: _moved(x, mesh), state))
    configs: dict[int, EasyDeLBaseConfig] = {}
    for _, node in nnx.iter_modules(copy):
        if isinstance(node, EasyDeLBaseModule | Embed) and node.config is not None:
            if id(node.config) not in configs:
                configs[id(node.config)] = _placed(node.config, mesh).seal()
            node.config = configs[id(node.config)]
    return copy


def _moved(array: Any, mesh: Mesh) -> jax.Array:
    old = array.sharding if isinstance(array, jax.Array) else None
    spec = old.spec if isinstance(old, NamedSharding) else PartitionSpec()
    sharding = NamedSharding(mesh, spec)
    return jax.device_put(part_on(array, sharding) if old is not None else array, sharding)


def _placed(config: EasyDeLBaseConfig, mesh: Mesh) -> EasyDeLBaseConfig:
    """A copy of a configuration, and of those nested in it, with a mesh."""
    copy = config.replace()
    nested = [one for one in copy.__dict__.values() if isinstance(one, EasyDeLBaseConfig)]
    for one in (copy, *nested):
        one.set_model_mesh(mesh)
    return copy
