"""The order of documents: several informs mixed in proportion and shuffled in every epoch.

The document at a position of an epoch is a pure function of the position, so any process can
compute any position at any time.

Webster's method (apportionment with divisors k + 1/2) determines the proportions. After any number
of documents, each inform has its share within about one document. In contrast to the
largest-remainder method, a longer prefix never has fewer documents of an inform than a shorter
prefix.

Permutations are equal in every version of numpy and on every machine, because a run that is resumed
after an upgrade must see the same order. numpy guarantees the raw stream of a bit generator, but
not the result of `permutation` (NEP 19).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np

from ed_data.errors import DataError
from ed_data.tokens.encoded import IntArray

# Identify the uses of the seed, so that no two uses share random numbers.
_DOCUMENTS, _BLOCKS = 1, 2


def permutation(size: int, *key: int, buffer: int | None = None) -> IntArray:
    """Return a permutation of `range(size)` that depends only on the key.

    Args:
        size: number of items.
        key: non-negative integers.
        buffer: number of neighboring items that are permuted together; None permutes all items, 0
            and 1 permute nothing.
    """
    if buffer is not None and buffer <= 1:
        return np.arange(size)
    draws = np.random.PCG64(np.random.SeedSequence(key)).random_raw(size)
    if buffer is None or buffer >= size:
        return np.argsort(draws, kind="stable")
    return np.lexsort((draws, np.arange(size) // buffer))


class Shares:
    """Exact shares of informs.

    Args:
        shares: share of each inform; any positive numbers.
        block: number of documents in which the proportions are exact.
    """

    def __init__(self, shares: Sequence[Fraction], block: int) -> None:
        self.shares = [share / sum(shares) for share in shares]
        self.block = block

    @classmethod
    def from_weights(cls, weights: Sequence[float], block: int) -> Shares:
        """Return shares from decimal weights, without rounding: 0.1 is exactly a tenth."""
        return cls([Fraction(repr(float(weight))) for weight in weights], block)

    def counts(self, total: int) -> list[int]:
        """Divide `total` documents among the informs by Webster's method, in exact arithmetic."""
        counts = [int(share * total + Fraction(1, 2)) for share in self.shares]
        indices = range(len(counts))
        while sum(counts) > total:
            last = max(
                (i for i in indices if counts[i]),
                key=lambda i: (Fraction(2 * counts[i] - 1) / self.shares[i], i),
            )
            counts[last] -= 1
        while sum(counts) < total:
            following = min(
                indices, key=lambda i: (Fraction(2 * counts[i] + 1) / self.shares[i], i)
            )
            counts[following] += 1
        return counts

    def block_order(self, number: int, key: tuple[int, ...] | None) -> IntArray:
        """Return the inform at each position of a block of a stream.

        Args:
            number: number of the block.
            key: seed of the order; None interleaves the informs evenly.
        """
        start_counts, end_counts = (self.counts((number + i) * self.block) for i in range(2))
        counts = np.array(end_counts, np.int64) - np.array(start_counts, np.int64)
        return np.repeat(np.arange(len(counts)), counts)[build_order(counts, key)]


def build_order(counts: IntArray, key: tuple[int, ...] | None) -> IntArray:
    """Return an order of `counts[i]` documents of each inform i, grouped by inform.

    Args:
        counts: [informs].
        key: seed of the order; None interleaves the informs evenly.
    """
    total = int(counts.sum())
    if key is not None:
        return permutation(total, *key)
    inform = np.repeat(np.arange(len(counts)), counts)
    rank = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.argsort((rank + 0.5) / counts[inform], kind="stable")


class DocumentOrder:
    """The document at each position of each epoch.

    Args:
        sizes: number of documents of each inform, at least 1.
        weights: share of each inform, or None to read each document once per epoch.
        stop_strategy: `restart`, `first_exhausted` or `all_exhausted`; see `Mixture`.
        block_size: number of documents in which the proportions are exact; None for the whole
            epoch.
        seed: seed of the order.
        shuffle: False keeps the order of each inform; without weights, the informs then follow one
            another.
        buffer: `shuffle_buffer_size`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        weights: Sequence[float] | None = None,
        stop_strategy: str = "restart",
        block_size: int | None = 2048,
        seed: int = 42,
        shuffle: bool = True,
        buffer: int | None = None,
    ) -> None:
        if not sizes or min(sizes) < 1:
            raise DataError(f"every inform needs at least one document, got {list(sizes)}")
        self._sizes = [int(size) for size in sizes]
        self._seed, self._shuffle, self._buffer = seed, shuffle, buffer
        if weights is None:
            self._shares = Shares([Fraction(size) for size in self._sizes], 1)
        else:
            self._shares = Shares.from_weights(weights, 1)
        self._one_after_another = not shuffle and weights is None
        self.epoch_size = self._epoch_size(stop_strategy if weights is not None else "restart")
        self._block = min(block_size or self.epoch_size, self.epoch_size)
        self._per_epoch = self._shares.counts(self.epoch_size)
        self._pass = lru_cache(maxsize=2 * len(self._sizes) + 2)(self._make_pass)

    def set_windows(self, window: int, get_step: Callable[[int], int]) -> None:
        """Receive the windows of a plan; the weights are constant, so windows do not matter."""

    def take(self, epoch: int, start: int, stop: int) -> tuple[IntArray, IntArray]:
        """Return the informs and document numbers at positions `start` to `stop` of an epoch.

        Positions beyond the end of the epoch are omitted.
        """
        stop = min(stop, self.epoch_size)
        if start >= stop:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        first = start // self._block
        blocks = range(first, (stop - 1) // self._block + 1)
        parts = [self._make_block(epoch, block) for block in blocks]
        inform = np.concatenate([part[0] for part in parts])
        document = np.concatenate([part[1] for part in parts])
        cut = slice(start - first * self._block, stop - first * self._block)
        return inform[cut], document[cut]

    def documents_per_epoch(self) -> list[int]:
        """Return the number of documents of each inform in an epoch."""
        return list(self._per_epoch)

    def _epoch_size(self, strategy: str) -> int:
        if strategy == "restart":
            return sum(self._sizes)
        ends = [size / share for size, share in zip(self._sizes, self._shares.shares, strict=True)]
        if strategy == "first_exhausted":
            size = max(int(min(ends)), 1)
            # Webster's method may exceed the exact share of an inform by one.
            while size > 1 and any(
                c > n for c, n in zip(self._shares.counts(size), self._sizes, strict=True)
            ):
                size -= 1
            return size
        size = -int(-max(ends) // 1)
        while any(c < n for c, n in zip(self._shares.counts(size), self._sizes, strict=True)):
            size += 1
        return size

    def _make_block(self, epoch: int, block: int) -> tuple[IntArray, IntArray]:
        begin = block * self._block
        end = min(begin + self._block, self.epoch_size)
        if self._one_after_another:
            sizes = np.array(self._sizes, np.int64)
            ends = np.cumsum(sizes)
            position = np.arange(begin, end)
            inform = np.searchsorted(ends, position, side="right")
            return inform, position - (ends - sizes)[inform]
        start_counts = self._shares.counts(begin)
        counts = np.array(self._shares.counts(end), np.int64) - np.array(start_counts, np.int64)
        # The draws of an inform continue from epoch to epoch: a later epoch first reads the
        # documents that the earlier epoch did not reach.
        drawn = [
            epoch * n + offset for n, offset in zip(self._per_epoch, start_counts, strict=True)
        ]
        key = (_BLOCKS, self._seed, epoch, block) if self._shuffle else None
        return self._arrange_block(counts, drawn, key)

    def _arrange_block(
        self, counts: IntArray, drawn: Sequence[int], key: tuple[int, ...] | None
    ) -> tuple[IntArray, IntArray]:
        """Return a block of `counts[i]` documents of each inform i, after `drawn[i]` documents."""
        inform = np.repeat(np.arange(len(counts)), counts)
        rank = np.arange(len(inform)) - np.repeat(np.cumsum(counts) - counts, counts)
        document = np.empty(len(inform), np.int64)
        for i, drawn_count in enumerate(drawn):
            inform_mask = inform == i
            document[inform_mask] = self._draw(i, drawn_count + rank[inform_mask])
        order = build_order(counts, key)
        # Shuffle the informs, but keep the order of the documents within each inform.
        inform_at = inform[order]
        by_inform = np.argsort(inform_at, kind="stable")
        result = np.empty_like(document)
        result[by_inform] = document
        return inform_at, result

    def _draw(self, inform: int, draw: IntArray) -> IntArray:
        if len(draw) == 0:
            return draw
        size = self._sizes[inform]
        passes, place = np.divmod(draw, size)
        result = np.empty(len(draw), np.int64)
        for number in range(int(passes[0]), int(passes[-1]) + 1):
            pass_mask = passes == number
            result[pass_mask] = self._pass(inform, number)[place[pass_mask]]
        return result

    def _make_pass(self, inform: int, number: int) -> IntArray:
        size = self._sizes[inform]
        if not self._shuffle:
            return np.arange(size)
        return permutation(size, _DOCUMENTS, self._seed, inform, number, buffer=self._buffer)
