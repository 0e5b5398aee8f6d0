"""Computation of encoder outputs, which later steps read from the device.

`ItemEncoder` writes to the rows of a table, which `ed_esurge.core.encoder_cache` assigns.
`SlotEncoder` writes the cross-attention keys and values of a sequence to the slot of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.inputs import Inputs

from ed_esurge.core.plan import EncodedItem
from ed_esurge.core.request import RequestError
from ed_esurge.model import batch_of_one, encoder_example, encoder_length
from ed_esurge.runner.memory import Memory
from ed_esurge.runner.weights import ServedWeights


class ItemEncoder:
    """Encodes items, one call per item. Each shape of the arrays is compiled once.

    Args:
        weights: weights of the model.
        memory: holder of the table.
        traced: wrapper that counts the traces of compiled functions.
    """

    def __init__(
        self,
        weights: ServedWeights,
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

    def compile(self) -> None:
        """Compile the function for the model's item. The rows of the table stay unused."""
        model = self._weights.model
        beyond = np.full(encoder_length(model), self._memory.encoder_rows, np.int32)
        self.run([EncodedItem("", encoder_example(model), beyond.tolist())])

    def _write(self, leaves: list[Any], table: jax.Array, arrays: Inputs, rows: jax.Array):
        outputs = self._weights.merged(leaves).encode(arrays).embeddings[0]
        if outputs.shape[0] != rows.shape[0]:
            raise ConfigError(
                f"the encoder returns {outputs.shape[0]} positions, but the item has "
                f"{rows.shape[0]} placeholder tokens: repeat the placeholder token for each "
                "position"
            )
        return table.at[rows].set(outputs.astype(table.dtype), mode="drop")


#: Smallest number of positions for which `SlotEncoder` compiles a function.
SHORTEST = 16


class SlotEncoder:
    """Encodes the prompts of an encoder-decoder, one call per sequence.

    Prompts are padded to a power of two, so that few functions are compiled.

    Args:
        weights: weights of the model.
        memory: holder of the cache with the slots.
        traced: wrapper that counts the traces of compiled functions.
    """

    def __init__(
        self,
        weights: ServedWeights,
        memory: Memory,
        traced: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        assert memory.encoder_length is not None, "the model is an encoder-decoder"
        self._weights, self._memory, self._longest = weights, memory, memory.encoder_length
        self._traced = traced
        self._written: Callable[..., Any] | None = None

    def run(self, items: Sequence[EncodedItem]) -> None:
        """Write the cross-attention keys and values of items to the slots of their sequences.

        Raises:
            RequestError: an item does not match the model.
        """
        for item in items:
            try:
                self._write_one(item.arrays["input_ids"], item.rows[0])
            except Exception as error:
                raise RequestError(item.request_id) from error

    def compile(self) -> None:
        """Compile the function for each padded length. The output stays in an unused slot."""
        for length in self._lengths():
            self._write_one(np.zeros(length, np.int32), 0)

    def _lengths(self) -> list[int]:
        lengths = [min(SHORTEST, self._longest)]
        while lengths[-1] < self._longest:
            lengths.append(min(2 * lengths[-1], self._longest))
        return lengths

    def _write_one(self, input_ids: np.ndarray, slot: int) -> None:
        count = len(input_ids)
        length = next(length for length in self._lengths() if length >= count)
        padded = np.zeros((2, 1, length), np.int32)
        padded[0, 0, :count], padded[1, 0, :count] = input_ids, 1
        if self._written is None:
            kept = jax.tree.map(lambda leaf: leaf.sharding, self._memory.cache)
            self._written = jax.jit(self._traced(self._write), donate_argnums=1, out_shardings=kept)
        arrays = Inputs({"input_ids": padded[0], "segment_ids": padded[1]})
        self._memory.cache = self._written(
            self._weights.leaves, self._memory.cache, arrays, np.int32(slot)
        )

    def _write(self, leaves: list[Any], cache: Any, arrays: Inputs, slot: jax.Array) -> Any:
        model: Any = self._weights.merged(leaves)
        return model.write_encoded(cache, model.encode(arrays), slot)
