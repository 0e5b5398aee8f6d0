"""Computation of encoder outputs, which later steps read from the device.

`ItemEncoder` writes to the rows of a table, which `ed_esurge.core.encoder_cache` assigns.
`SlotEncoder` writes the cross-attention keys and values of a sequence to the slot of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from ed_infra.inputs import Inputs
from ed_layers.cache.protocol import Cache
from ed_models.modalities.items import EncoderItems, ItemArrays, batch_of_one

from ed_esurge.core.plan import EncodedItem
from ed_esurge.core.request import RequestError
from ed_esurge.runner.background import COMPILERS
from ed_esurge.runner.memory import Memory
from ed_esurge.runner.weights import ServedWeights, abstract

#: The arrays of the items of one call, [items, ...], and the rows of the table, [items, positions].
EncoderCall = tuple[Inputs, np.ndarray]
#: Numbers of items of one call on a GPU or TPU, largest first.
AT_ONCE = (4, 2)
#: Most encoder positions of a call with several items.
MOST_POSITIONS = 4096


class ItemEncoder:
    """Encodes items. Each shape of the arrays is compiled once for each number of items of a call.

    Args:
        weights: weights of the model.
        memory: holder of the table.
        traced: wrapper that counts the traces of compiled functions.
        items: the shapes of the items.
        at_once: numbers of items of calls with several items, such as `AT_ONCE`; () = each call
            encodes one item.
        ahead_of_time: whether `compile` compiles without running the encoder.
    """

    def __init__(
        self,
        weights: ServedWeights,
        memory: Memory,
        traced: Callable[[Callable[..., Any]], Callable[..., Any]],
        items: EncoderItems,
        *,
        at_once: tuple[int, ...] = (),
        ahead_of_time: bool = True,
    ) -> None:
        self._weights, self._memory, self._items = weights, memory, items
        self._at_once, self._ahead_of_time = at_once, ahead_of_time
        # The table keeps its sharding, so that steps are not traced again.
        self._written = jax.jit(
            traced(self._write), donate_argnums=1, out_shardings=memory.placement
        )
        self._compiled: dict[tuple[int, ...], Callable[..., Any]] = {}  # by the shape of the rows

    def run(self, items: Sequence[EncodedItem]) -> None:
        """Write the outputs of items to the table.

        Raises:
            RequestError: an item does not match the model.
        """
        calls_by_length: dict[int, list[tuple[str, EncoderCall]]] = {}
        for item in items:
            try:
                inputs, rows = self._call_of_one(item.arrays, item.rows)
            except Exception as error:
                raise RequestError(item.request_id) from error
            calls_by_length.setdefault(rows.shape[1], []).append((item.request_id, (inputs, rows)))
        for length, calls in calls_by_length.items():
            for count in self._counts(length):
                while len(calls) >= count:
                    self._encode_named(calls[:count])
                    calls = calls[count:]

    def _encode_named(self, calls: Sequence[tuple[str, EncoderCall]]) -> None:
        """Encode items in one call; after an error one by one, to find the item that causes it."""
        try:
            self._encode(concat_calls([call for _, call in calls]))
        except Exception as error:
            if len(calls) == 1:
                raise RequestError(calls[0][0]) from error
            for named in calls:
                self._encode_named([named])

    def compile(self) -> None:
        """Compile the function for each shape of items. The rows of the table stay unused."""
        ones = [self._call_of_one(arrays, []) for arrays in self._items.examples()]
        calls = [concat_calls([one] * n) for one in ones for n in self._counts(one[1].shape[1])]
        if not self._ahead_of_time:
            for call in calls:
                self._encode(call)
            return
        like, table = self._weights.like, abstract(self._memory.encoded)
        with ThreadPoolExecutor(COMPILERS) as threads:
            pending = {
                rows.shape: threads.submit(self._written.lower(like, table, inputs, rows).compile)
                for inputs, rows in calls
            }
        self._compiled |= {shape: future.result() for shape, future in pending.items()}

    def _counts(self, length: int) -> tuple[int, ...]:
        """Return the numbers of items of a call, for items of `length` encoder positions."""
        return (*(n for n in self._at_once if n * length <= MOST_POSITIONS), 1)

    def _call_of_one(self, arrays: ItemArrays, rows: Sequence[int]) -> EncoderCall:
        """Return padded arrays, and the row of each encoder position; padding has no row."""
        arrays = self._items.pad_item(arrays)
        padded = np.full((1, self._items.count(arrays)), self._memory.encoder_rows, np.int32)
        padded[0, : len(rows)] = rows
        return batch_of_one(arrays), padded

    def _encode(self, call: EncoderCall) -> None:
        write = self._compiled.get(call[1].shape, self._written)
        self._memory.encoded = write(self._weights.leaves, self._memory.encoded, *call)

    def _write(self, leaves: list[Any], table: jax.Array, arrays: Inputs, rows: jax.Array):
        outputs = self._weights.merge_leaves(leaves).encode(arrays).embeddings
        outputs = outputs.reshape(-1, outputs.shape[-1]).astype(table.dtype)
        return table.at[rows.reshape(-1)].set(outputs, mode="drop")


def concat_calls(calls: Sequence[EncoderCall]) -> EncoderCall:
    """Return one call for items of one shape."""
    inputs = {name: np.concatenate([i[name] for i, _ in calls]) for name in calls[0][0]}
    return Inputs(inputs), np.concatenate([rows for _, rows in calls])


#: Smallest number of positions for which `SlotEncoder` compiles a function.
_SHORTEST = 16


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
        lengths = [min(_SHORTEST, self._longest)]
        while lengths[-1] < self._longest:
            lengths.append(min(2 * lengths[-1], self._longest))
        return lengths

    def _write_one(self, input_ids: np.ndarray, slot: int) -> None:
        count = len(input_ids)
        length = next(length for length in self._lengths() if length >= count)
        padded = np.zeros((2, 1, length), np.int32)
        padded[0, 0, :count], padded[1, 0, :count] = input_ids, 1
        if self._written is None:
            cache_shardings = jax.tree.map(lambda leaf: leaf.sharding, self._memory.cache)
            self._written = jax.jit(
                self._traced(self._write), donate_argnums=1, out_shardings=cache_shardings
            )
        arrays = Inputs({"input_ids": padded[0], "segment_ids": padded[1]})
        self._memory.cache = self._written(
            self._weights.leaves, self._memory.cache, arrays, np.int32(slot)
        )

    def _write(self, leaves: list[jax.Array], cache: Cache, arrays: Inputs, slot: jax.Array) -> Any:
        model: Any = self._weights.merge_leaves(leaves)
        return model.write_encoded(cache, model.encode(arrays), slot)
