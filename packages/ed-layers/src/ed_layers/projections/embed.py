"""Token embedding. Legend: b batch, s sequence, d hidden, v vocabulary."""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.sharding.placement import constrain
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ed_layers.context import STREAM, name_activation
from ed_layers.projections.dot import Product
from ed_layers.projections.linear import Initializer
from ed_layers.projections.matmul import gather_rows


class TableRows(Protocol):
    """A table [v, d] that is not a plain array (quantized): a pytree that returns rows."""

    @property
    def T(self) -> Product:
        """The matrix [d, v]."""
        ...

    def take(self, rows: Int[Array, "*rows"]) -> Float[Array, "*rows d"]:
        """Return the rows of the given token ids."""
        ...


class Embed(nnx.Module):
    """A table [v, d]; also the language-model head if the two are tied.

    Args:
        vocab_size, features: v and d.
        config: the model's configuration, for the sharding of the rows.
        padding: token id whose lookups have no gradient (torch's `padding_idx`); None = all have.
        dtype, param_dtype: dtype of the rows and of the stored table.
        embedding_init: initializer of the table.
        rngs: randomness of the table.
    """

    def __init__(
        self,
        vocab_size: int,
        features: int,
        *,
        config: EasyDeLBaseConfig,
        padding: int | None = None,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        embedding_init: Initializer,
        rngs: nnx.Rngs,
    ):
        table = embedding_init(rngs.params(), (vocab_size, features), param_dtype)
        self.embedding = nnx.Param(table, axes=("vocab", "embed"))
        self.dtype, self.padding = dtype, padding
        self.config = config

    @property
    def table(self) -> jax.Array | TableRows:
        """[v, d]; its transpose is the matrix of a tied head."""
        return self.embedding.get_value()

    def __call__(self, input_ids: Int[Array, "b s"]) -> Float[Array, "b s d"]:
        # With rows sharded over hidden (fsdp), the partitioner would replicate the result and shard
        # it again; gathering the rows first keeps a plain lookup.
        table = jax.tree.map(self._whole_rows, self.table)
        is_array = isinstance(table, jax.Array)
        rows = gather_rows(table, input_ids, axis=0) if is_array else table.take(input_ids)
        if self.padding is not None:
            fixed = (input_ids == self.padding)[..., None]
            rows = jnp.where(fixed, jax.lax.stop_gradient(rows), rows)
        x = rows.astype(self.dtype)
        return name_activation(constrain(x, STREAM, self.config), "embeddings")

    def _whole_rows(self, array: jax.Array) -> jax.Array:
        # Each device has all panels of a table in panels.
        return constrain(array, ("vocab", None), self.config) if array.ndim == 2 else array
