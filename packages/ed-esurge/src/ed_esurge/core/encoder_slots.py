"""Encoder outputs of encoder-decoders: one slot of the cross-attention cache per running sequence.

The runner writes the outputs (`ed_esurge.runner.encoder.SlotEncoder`). The slot of an encoder
output is the slot of its sequence, so an output lives as long as the sequence runs. A preempted
sequence is encoded again.
"""

from __future__ import annotations

from ed_esurge.core.plan import EncodedItem
from ed_esurge.core.request import Request


class EncoderSlots:
    """Plans the encoder outputs of started sequences, and limits the work of a step.

    Args:
        capacity: maximum number of encoder positions of a sequence.
        per_step: maximum number of encoder positions that a step computes. A single longer output
            is allowed.
    """

    def __init__(self, capacity: int, per_step: int) -> None:
        self.capacity, self.per_step = capacity, per_step
        self._planned: set[str] = set()  # running sequences whose output is written or in `_new`
        self._new: dict[str, Request] = {}
        self._left = per_step

    def admit(self, request: Request, count: int) -> int:
        """Return `count`, or 0 if the encoder output of the sequence exceeds the budget."""
        name = request.request_id
        if name in self._planned:
            return count
        (item,) = request.encoder_inputs
        if item.length > self._left and self._left < self.per_step:
            return 0
        self._left -= item.length
        self._planned.add(name)
        self._new[name] = request
        return count

    def index(self, request: Request, start: int, stop: int) -> tuple[()]:
        """Return (): no token embedding is replaced."""
        return ()

    def begin_step(self) -> None:
        """Renew the budget."""
        self._left = self.per_step

    def take_items(self) -> tuple[EncodedItem, ...]:
        """Return the items to encode before the planned step. Their rows are the slots."""
        new, self._new = self._new, {}
        items = []
        for name, request in new.items():
            assert request.slot is not None, "a sequence that starts has a slot"
            items.append(EncodedItem(name, request.encoder_inputs[0].arrays, [request.slot]))
        return tuple(items)

    def release(self, request: Request, *, computed: int | None = None) -> None:
        """Forget a sequence that ends or is preempted. `computed` is for `EncoderCache`."""
        if computed is None:
            self._planned.discard(request.request_id)
            self._new.pop(request.request_id, None)

    def clear(self) -> None:
        """Do nothing: sequences that start again are encoded again."""
        assert not self._planned, "sequences are running"
