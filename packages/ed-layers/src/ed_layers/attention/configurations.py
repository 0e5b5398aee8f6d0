"""The configurations of the layers of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from ed_infra.config import EasyDeLBaseConfig
from flax import nnx

from ed_layers.attention.mechanism import Mechanism


def change_configurations(
    model: nnx.Module, change: Callable[[EasyDeLBaseConfig], EasyDeLBaseConfig]
) -> None:
    """Replace each configuration of a model by a changed copy, also in its attention.

    Args:
        change: returns a changed copy, which is sealed.
    """
    changed: dict[int, EasyDeLBaseConfig] = {}

    def copy(config: EasyDeLBaseConfig) -> EasyDeLBaseConfig:
        if id(config) not in changed:
            changed[id(config)] = change(config).seal()
        return changed[id(config)]

    for _, module in nnx.iter_modules(model):
        node = cast(Any, module)
        if isinstance(config := getattr(node, "config", None), EasyDeLBaseConfig):
            node.config = copy(config)
        mechanism = getattr(node, "mechanism", None)
        if isinstance(mechanism, Mechanism) and mechanism.config is not None:
            node.mechanism = replace(mechanism, config=copy(mechanism.config))
