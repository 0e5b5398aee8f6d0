"""Computation of encoder outputs, which later steps read from a table on the device.

`ed_esurge.core.encoder_cache.EncoderCache` assigns the rows of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.inputs import Inputs

from ed_esurge.core.plan import EncodedItem
from ed_esurge.core.request import RequestError
from ed_esurge.model import batch_of_one
from ed_esurge.runner.memory import Memory
from ed_esurge.runner.weights import Weights


class ItemEncoder:
    """Encodes items, one call per item. Each shape of the arrays is compiled once.

    Args:
        weights: weights of the model.
        memory: holder of the table.
        traced: wrapper that counts the traces of compiled functions.
    """

    def __init__(
        self,
        weights: Weights,
        memory: Memory,
        traced: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        self._weights, self._memory = weights, memory
        self._written = jax.jit(
            traced(self._write), donate_argnums=1, out_shardings=memory.everywhere
        )

    def run(self, items: Sequence[EncodedItem]) -> None:
        """Write the outputs of items to the table.

        Raises:
            RequestError: an item does not match the model.
        """
        for item in items:
            try:
                self._memory.encoded = self._written(
                    self._weights.leaves,
                    self._memory.encoded,
                    batch_of_one(item.arrays),
                    np.asarray(item.rows, np.int32),
                )
            except Exception as error:
                raise RequestError(item.request_id) from error

    def compile(self, arrays: Mapping[str, np.ndarray], length: int) -> None:
        """Compile the function for arrays of one shape. The rows of the table stay unused."""
        beyond = np.full(length, self._memory.encoder_rows, np.int32)
        self.run([EncodedItem("", arrays, beyond.tolist())])

    def _write(self, leaves: list[Any], table: jax.Array, arrays: Inputs, rows: jax.Array):
        outputs = self._weights.merged(leaves).encode(arrays).embeddings[0]
        if outputs.shape[0] != rows.shape[0]:
            raise ConfigError(
                f"the encoder returns {outputs.shape[0]} positions, but the item has "
                f"{rows.shape[0]} placeholder tokens: repeat the placeholder token for each "
                "position"
            )
        return table.at[rows].set(outputs.astype(table.dtype), mode="drop")
