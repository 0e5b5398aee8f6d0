"""Token embedding. Legend: b batch, s sequence, d hidden, v vocabulary."""

from __future__ import annotations

import jax.numpy as jnp
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.sharding import constrain
from flax import nnx
from jaxtyping import Array, Float, Int

from ed_layers.linear import Initializer
from ed_layers.named import STREAM, named


class Embed(nnx.Module):
    """A table [v, d]; also the language-model head where the two are tied."""

    def __init__(
        self,
        vocab_size: int,
        features: int,
        *,
        config: EasyDeLBaseConfig,
        dtype: jnp.dtype = jnp.float32,
        param_dtype: jnp.dtype = jnp.float32,
        embedding_init: Initializer,
        rngs: nnx.Rngs,
    ):
        table = embedding_init(rngs.params(), (vocab_size, features), param_dtype)
        self.embedding = nnx.Param(table, axes=("vocab", "embed"))
        self.dtype = dtype
        self.config = config

    def __call__(self, input_ids: Int[Array, "b s"]) -> Float[Array, "b s d"]:
        # Rows that are split over hidden (fsdp) would make the partitioner replicate the result and
        # split it again; gathering the rows first leaves it a lookup.
        table = constrain(self.embedding.get_value(), ("vocab", None), self.config)
        x = jnp.take(table, input_ids, axis=0).astype(self.dtype)
        return named(constrain(x, STREAM, self.config), "embeddings")
