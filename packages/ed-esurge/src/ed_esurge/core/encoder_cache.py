"""Cache of encoder outputs: the rows of the device table that hold the output of each item.

The runner stores the outputs (`ed_esurge.runner.encoder`). One row holds one encoder position.
"""

from __future__ import annotations

from collections import OrderedDict

from ed_esurge.core.commands import EncoderInput, find_runs
from ed_esurge.core.plan import EncodedItem
from ed_esurge.core.request import Request


class EncoderCache:
    """Assigns rows to items, limits the work of a step, and evicts items without holders (LRU).

    A sequence holds an item from the first chunk that needs the item to the chunk that ends it, so
    it never waits for rows that it holds itself.

    Args:
        capacity: number of rows; at least the length of the longest item.
        per_step: maximum number of rows that a step computes. A single longer item is allowed.
        whole_items: whether a step computes all tokens of an item, because they attend to each
            other.

    Attributes:
        queries, hits: number of items looked up, and of those found, since the start.
    """

    def __init__(self, capacity: int, per_step: int, *, whole_items: bool = False) -> None:
        self.capacity, self.per_step, self.whole = capacity, per_step, whole_items
        self.queries = self.hits = 0
        self._rows: dict[bytes, list[int]] = {}
        self._holders: dict[bytes, set[str]] = {}
        self._held: dict[str, set[bytes]] = {}  # by the id of a sequence
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._free = list(range(capacity - 1, -1, -1))
        self._items: list[EncodedItem] = []
        self._left = per_step

    @property
    def usage(self) -> float:
        """Fraction of the rows that held items use, 0 … 1."""
        idle = sum(len(self._rows[key]) for key in self._idle)
        return 1.0 - (len(self._free) + idle) / self.capacity

    @property
    def num_rows(self) -> int:
        """Number of rows that hold an output, including those of items without holders."""
        return self.capacity - len(self._free)

    @property
    def num_items(self) -> int:
        """Number of items whose outputs are in the table."""
        return len(self._rows)

    def __contains__(self, key: bytes) -> bool:
        return key in self._rows

    def admit(self, request: Request, count: int) -> int:
        """Hold the items that the next tokens of a request need.

        Args:
            request: the sequence.
            count: number of tokens to compute, from `request.num_computed`.

        Returns:
            the number of tokens that this step can compute: `count`, or the number of tokens before
            the first item that exceeds the budget of the step or the free rows, see also `uncut`.
        """
        start = request.num_computed
        for item in request.encoder_inputs:
            if item.start >= start + count:
                break
            if item.stop > start and not self._hold(request.request_id, item):
                return self.uncut(request, max(item.start - start, 0))
        return self.uncut(request, count)

    def uncut(self, request: Request, count: int) -> int:
        """Return the largest number of next tokens, up to `count`, that cuts no item in two.

        The result is `count` unless items are whole. Adjacent items count as one.
        """
        if not self.whole:
            return count
        start = request.num_computed
        stop = start + count
        for first, last in reversed(find_runs(request.encoder_inputs)):
            if first < stop < last:
                stop = first
        return max(stop - start, 0)

    def index(self, request: Request, start: int, stop: int) -> list[int] | tuple[()]:
        """Return the row of each token from `start` to before `stop`; -1 for a token without a row,
        () if no token has a row."""
        index = [-1] * (stop - start)
        has_rows = False
        for item in request.encoder_inputs:
            first, last = max(item.start, start), min(item.stop, stop)
            if first < last:
                rows = item.spread(self._rows[item.key])
                index[first - start : last - start] = rows[first - item.start : last - item.start]
                has_rows = True
        return index if has_rows else ()

    def begin_step(self) -> None:
        """Renew the budget."""
        self._left = self.per_step

    def take_items(self) -> tuple[EncodedItem, ...]:
        """Return the items to encode before the planned step."""
        items, self._items = tuple(self._items), []
        return items

    def release(self, request: Request, *, computed: int | None = None) -> None:
        """End the hold of a sequence on its items.

        Args:
            request: the sequence.
            computed: number of computed tokens: an item that is computed in part stays held. None
                releases all items.
        """
        held_keys = self._held.get(request.request_id)
        if held_keys is None:
            return
        partial_keys = {
            item.key
            for item in request.encoder_inputs
            if computed is not None and item.start < computed < item.stop
        }
        for key in sorted(held_keys - partial_keys):
            held_keys.discard(key)
            self._holders[key].discard(request.request_id)
            if not self._holders[key]:
                self._idle[key] = None
        if not held_keys:
            del self._held[request.request_id]

    def clear(self) -> None:
        """Remove all items. No sequence may hold an item."""
        assert not self._held, "sequences hold items"
        self._rows.clear()
        self._holders.clear()
        self._idle.clear()
        self._free = list(range(self.capacity - 1, -1, -1))
        self.take_items()

    def _hold(self, sequence: str, item: EncoderInput) -> bool:
        """Hold an item for a sequence. Return False, without changes, if it does not fit."""
        key = item.key
        held_keys = self._held.get(sequence, ())
        if key in held_keys:
            return True
        if key not in self._rows:
            over_budget = item.length > self._left and self._left < self.per_step
            rows = None if over_budget else self._allocate(item.length)
            if rows is None:
                return False
            self._left -= item.length
            self._rows[key], self._holders[key] = rows, set()
            self._items.append(EncodedItem(sequence, item.arrays, rows))
        else:
            self.hits += 1
        self.queries += 1
        self._idle.pop(key, None)
        self._holders[key].add(sequence)
        self._held.setdefault(sequence, set()).add(key)
        return True

    def _allocate(self, count: int) -> list[int] | None:
        """Return free rows. Evict items without holders, least recently used first, if needed."""
        if count > len(self._free) + sum(len(self._rows[key]) for key in self._idle):
            return None
        while len(self._free) < count:
            key, _ = self._idle.popitem(last=False)
            self._free += reversed(self._rows.pop(key))
            del self._holders[key]
        return [self._free.pop() for _ in range(count)]
