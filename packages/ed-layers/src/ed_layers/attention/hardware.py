"""Where a model runs, and which kernel languages there are for it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import jax


def platform_of(config: Any) -> str:
    """Where a model runs: the platform of its mesh ("cpu", "gpu" or "tpu"), which may be one that
    is compiled for and not here."""
    mesh = getattr(config, "mesh", None)
    if mesh is None:
        return jax.default_backend()
    return mesh.devices.flat[0].platform


def compute_capability_of(config: Any) -> tuple[int, ...]:
    """Generation of the NVIDIA devices of a model, (9, 0) for Hopper; () where unknown."""
    mesh = getattr(config, "mesh", None)
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    text = str(getattr(device, "compute_capability", ""))
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def has_tokamax() -> bool:
    """Whether tokamax, which has the Triton kernels, is installed; it is optional."""
    return find_spec("tokamax") is not None
