"""Modules that are trained in full beside adapters: PEFT's `modules_to_save`.

Such a module keeps its class and the names of its parameters. Each parameter is a trained copy, a
`SavedParam`. The values of the base are in `base_<name>`, an `OriginalParam`, which is not trained.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from ed_infra.errors import ConfigError
from flax import nnx

from ed_layers.quantization.model import QuantParam
from ed_layers.quantization.qarray import QArray

#: Prefix of the attribute with the values of the base.
BASE = "base_"


class SavedParam(nnx.LoRAParam):
    """A trained copy of a parameter; trainers select it together with the matrices of adapters."""


class OriginalParam(nnx.Variable):
    """The parameter of the base under a trained copy; its metadata `kind` is its former class."""


def with_copies(module: nnx.Module, key: jax.Array | None = None) -> nnx.Module:
    """Replace each parameter of a module by a trained copy, in place; inner modules are unchanged.

    Raises:
        ConfigError: a parameter cannot be trained in full.
    """
    for name, variable in list(vars(module).items()):
        if not isinstance(variable, nnx.Variable):
            continue
        if type(variable) not in (nnx.Param, QuantParam):
            raise ConfigError(
                f"{name} is no plain parameter of the model ({type(variable).__name__}): omit the "
                "module from modules_to_save"
            )
        value, axes = variable.get_value(), variable.get_metadata().get("axes")
        dense_value = value.dense() if isinstance(value, QArray) else value
        setattr(module, BASE + name, OriginalParam(value, kind=type(variable), axes=axes))
        # A training step donates the buffers of the trained copy, so the base needs its own.
        setattr(module, name, SavedParam(jax.tree.map(jnp.copy, dense_value), axes=axes))
    return module


def has_copies(module: nnx.Module) -> bool:
    """Return whether parameters of a module, without those of inner modules, are trained copies."""
    return any(isinstance(variable, SavedParam) for variable in vars(module).values())


def get_copies(module: nnx.Module) -> dict[str, SavedParam]:
    """Return the trained copies of a module by name, without those of inner modules."""
    return {name: x for name, x in vars(module).items() if isinstance(x, SavedParam)}


def keep_copies(module: nnx.Module) -> None:
    """Make the trained copies ordinary parameters, in place, and drop the values of the base."""
    for name, copy in get_copies(module).items():
        setattr(module, name, nnx.Param(copy.get_value(), axes=copy.get_metadata()["axes"]))
        delattr(module, BASE + name)


def drop_copies(module: nnx.Module) -> None:
    """Restore the values of the base, in place."""
    for name in get_copies(module):
        original = getattr(module, BASE + name)
        metadata = original.get_metadata()
        setattr(module, name, metadata["kind"](original.get_value(), axes=metadata["axes"]))
        delattr(module, BASE + name)
