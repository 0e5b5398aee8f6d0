"""The order of documents: several informs mixed in proportion, shuffled anew in every epoch.

The document at a position of an epoch is computed, not drawn from a running generator, so any
position can be asked for at any time, in any process.

Proportions are kept by Webster's method (apportionment with divisors k + 1/2): after any number of
documents each inform has its share within about one document, and the shares of a longer prefix
never take back one of a shorter, which largest remainders would.

Permutations are the same in every version of numpy and on every machine: numpy keeps the raw stream
of a bit generator fixed for ever, but not the result of its own `permutation` (NEP 19), and a run
that is resumed after an upgrade must see the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ed_data.errors import DataError

IntArray = NDArray[np.int64]
# Names of the uses of the seed, so that no two share their random numbers.
_DOCUMENTS, _BLOCKS = 1, 2


def permutation(size: int, *key: int, buffer: int | None = None) -> IntArray:
    """Return a permutation of `range(size)` that depends on the key alone.

    Args:
        size: number of items.
        key: non-negative integers that name the permutation.
        buffer: None, or the number of neighbouring items among which items change places; with 0
            or 1 nothing moves.
    """
    if buffer is not None and buffer <= 1:
        return np.arange(size)
    draws = np.random.PCG64(np.random.SeedSequence(key)).random_raw(size)
    if buffer is None or buffer >= size:
        return np.argsort(draws, kind="stable")
    return np.lexsort((draws, np.arange(size) // buffer))


class Shares:
    """How documents are divided among informs, exactly.

    Args:
        shares: of each inform; any positive numbers.
        block: documents among which the proportions are exact.
    """

    def __init__(self, shares: Sequence[Fraction], block: int) -> None:
        self.shares = [share / sum(shares) for share in shares]
        self.block = block

    @classmethod
    def of_weights(cls, weights: Sequence[float], block: int) -> Shares:
        """Take the user's own digits exactly: 0.1 is a tenth."""
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
        """The inform of each place of a block of a stream.

        Args:
            number: of the block.
            key: seeds the order; None draws in an even rhythm.
        """
        before, after = (self.counts((number + i) * self.block) for i in range(2))
        counts = np.array(after, np.int64) - np.array(before, np.int64)
        return np.repeat(np.arange(len(counts)), counts)[shuffled(counts, key)]


def shuffled(counts: IntArray, key: tuple[int, ...] | None) -> IntArray:
    """An order of `counts[i]` documents of each inform i, which follow one another.

    Args:
        counts: [informs].
        key: seeds the order; None interleaves the informs in an even rhythm.
    """
    total = int(counts.sum())
    if key is not None:
        return permutation(total, *key)
    inform = np.repeat(np.arange(len(counts)), counts)
    rank = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.argsort((rank + 0.5) / counts[inform], kind="stable")


class DocumentOrder:
    """Which document stands at which position of which epoch.

    Args:
        sizes: number of documents of each inform, all above 0.
        weights: share of each inform, or None for "each document once per epoch".
        stop_strategy: `restart`, `first_exhausted` or `all_exhausted`; see `Mixture`.
        block_size: documents among which the proportions are exact; None for the whole epoch.
        seed: orders everything.
        shuffle: False keeps the order of each inform; without weights the informs then follow
            one another.
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
            raise DataError(f"every inform needs a document; they have {list(sizes)}")
        self._sizes = [int(size) for size in sizes]
        self._seed, self._shuffle, self._buffer = seed, shuffle, buffer
        if weights is None:
            self._shares = Shares([Fraction(size) for size in self._sizes], 1)
        else:
            self._shares = Shares.of_weights(weights, 1)
        self._one_after_another = not shuffle and weights is None
        self.epoch_size = self._epoch_size(stop_strategy if weights is not None else "restart")
        self._block = min(block_size or self.epoch_size, self.epoch_size)
        self._per_epoch = self._shares.counts(self.epoch_size)
        self._pass = lru_cache(maxsize=2 * len(self._sizes) + 2)(self._make_pass)

    def follow(self, window: int, step_of: Callable[[int], int]) -> None:
        """The shares are the same in every window of a plan: `ScheduledOrder` has others."""

    def take(self, epoch: int, start: int, stop: int) -> tuple[IntArray, IntArray]:
        """Return the informs and the document numbers at positions `start` to `stop` of an epoch.

        Positions beyond the epoch are left out.
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
        """How many documents of each inform an epoch holds."""
        return list(self._per_epoch)

    def _epoch_size(self, strategy: str) -> int:
        if strategy == "restart":
            return sum(self._sizes)
        ends = [size / share for size, share in zip(self._sizes, self._shares.shares, strict=True)]
        if strategy == "first_exhausted":
            size = max(int(min(ends)), 1)
            # Webster may give an inform one above its exact share.
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
        before = self._shares.counts(begin)
        counts = np.array(self._shares.counts(end), np.int64) - np.array(before, np.int64)
        # Draws of an inform run on from epoch to epoch: a later epoch reads first the documents
        # that an earlier one left out.
        drawn = [epoch * n + offset for n, offset in zip(self._per_epoch, before, strict=True)]
        key = (_BLOCKS, self._seed, epoch, block) if self._shuffle else None
        return self._arranged(counts, drawn, key)

    def _arranged(
        self, counts: IntArray, drawn: Sequence[int], key: tuple[int, ...] | None
    ) -> tuple[IntArray, IntArray]:
        """A block of `counts[i]` documents of each inform i, of which `drawn[i]` came before."""
        inform = np.repeat(np.arange(len(counts)), counts)
        rank = np.arange(len(inform)) - np.repeat(np.cumsum(counts) - counts, counts)
        document = np.empty(len(inform), np.int64)
        for i, before in enumerate(drawn):
            here = inform == i
            document[here] = self._draw(i, before + rank[here])
        order = shuffled(counts, key)
        # Shuffle the informs, but keep the order of the documents of each, which its pass decided.
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
            here = passes == number
            result[here] = self._pass(inform, number)[place[here]]
        return result

    def _make_pass(self, inform: int, number: int) -> IntArray:
        size = self._sizes[inform]
        if not self._shuffle:
            return np.arange(size)
        return permutation(size, _DOCUMENTS, self._seed, inform, number, buffer=self._buffer)
