"""Token embedding. Legend: b batch, s sequence, d hidden, v vocabulary."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ed_layers.linear import Initializer


class Embed(nnx.Module):
    """A table [v, d]; also the language-model head where the two are tied."""

    def __init__(
        self,
        vocab_size: int,
        features: int,
        *,
        dtype: jnp.dtype = jnp.float32,
        param_dtype: jnp.dtype = jnp.float32,
        embedding_init: Initializer,
        rngs: nnx.Rngs,
    ):
        table = embedding_init(rngs.params(), (vocab_size, features), param_dtype)
        self.embedding = nnx.Param(table, axes=("vocab", "embed"))
        self.dtype = dtype

    def __call__(self, input_ids: Int[Array, "b s"]) -> Float[Array, "b s d"]:
        return jnp.take(self.embedding.get_value(), input_ids, axis=0).astype(self.dtype)
