"""What tests of the native library's products share. A file that imports `anywhere` uses it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_layers.native import library
from hypothesis import strategies as st

built = pytest.mark.skipif(
    library.level() is None, reason="not built: python -m ed_layers.native build"
)
DTYPES = st.sampled_from(["float32", "bfloat16"])


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' process has several devices."""
    monkeypatch.setenv(library.VARIABLE, "1")


def drawn(seed: int, *shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def exact(x: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float64)
