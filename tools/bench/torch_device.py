"""Run torch on the device of jax, so that both contenders of a run use the same hardware."""

from __future__ import annotations

from typing import Any

import numpy as np


def torch_device() -> str:
    """Return torch's name of jax's default device: "cuda" or "cpu"."""
    import jax

    return "cuda" if jax.default_backend() == "gpu" else "cpu"


def wait_for_torch() -> None:
    """Return after torch's work on the device is done."""
    if torch_device() == "cuda":
        import torch

        torch.cuda.synchronize()


def to_numpy(array: Any) -> np.ndarray:
    """Return an array of jax or torch in float32 on the host; float64 stays float64."""
    import jax

    if isinstance(array, jax.Array):
        wide = array.dtype == np.float64
        return np.asarray(array, np.float64 if wide else np.float32)
    return array.detach().float().cpu().numpy()
