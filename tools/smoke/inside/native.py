"""Compute a matrix product, and print the kernels that computed it."""

import jax
import jax.numpy as jnp
import numpy as np
from ed_layers.native import describe
from ed_layers.projections.dot import dot

x = jax.random.normal(jax.random.key(0), (4, 256))
w = jax.random.normal(jax.random.key(1), (256, 256))
np.testing.assert_allclose(dot(x, w), jnp.matmul(x, w), atol=1e-3)
print(describe())
