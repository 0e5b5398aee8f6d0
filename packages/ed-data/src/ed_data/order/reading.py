"""Streams of documents from several informs, mixed in proportion, from any position.

Neither the number of documents nor their lengths are known in advance. The state contains the
position of each inform (file, row and byte), so resuming reads nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ed_data.errors import DataError
from ed_data.order.mixing import Shares, permutation
from ed_data.order.schedule import ScheduledShares
from ed_data.rows.documents import Documents, Placed, Tally
from ed_data.rows.example import Example
from ed_data.sources.lines import START, Spot

SHARDS, _DRAWS = 5, 6  # identify uses of the seed, as in mixing


class Passes:
    """The documents of one inform, pass after pass over its files.

    Args:
        documents: the documents of the inform.
        keep: test whether a document belongs to the split.
        key: seed of the order of the files, which changes from pass to pass; None keeps the order.
        required: raise an error for a pass without documents.
    """

    def __init__(
        self,
        documents: Documents,
        keep: Callable[[Example], bool],
        key: tuple[int, ...] | None,
        required: bool = True,
    ) -> None:
        self.documents, self.label = documents, documents.inform.label
        self._keep, self._required = keep, required
        # `num_rows` selects the first rows of the first file, so the order of files is fixed.
        self._key = key if documents.inform.num_rows is None else None
        self._stream: Iterator[Placed] | None = None
        self.number = 0
        self._shard, self._spot = (
            0,
            START,
        )  # number of the file in this pass, and the position in the file
        self._rows = self._documents = 0  # that were read in this pass

    def next(self) -> Example | None:
        """Return the next document, or None at the end of a pass; then the next pass begins.

        Raises:
            DataError: a row cannot be read, or a pass has no documents.
        """
        limit = self.documents.inform.num_rows
        while self._shard < len(self.documents.shards) and (limit is None or self._rows < limit):
            if self._stream is None:
                self._stream = self.documents.read(self._file(self._shard), self._spot)
            placed = next(self._stream, None)
            if placed is None:
                self._stream, self._shard, self._spot = None, self._shard + 1, START
                continue
            self._spot = placed.next_cursor.spot
            self._rows += not self._spot.part
            if placed.example is not None and self._keep(placed.example):
                self._documents += 1
                return placed.example
        if self._required and not self._documents:
            raise DataError(
                f"inform {self.label!r} has no documents for this split: {self.documents.tally}"
            )
        self._move(self.number + 1)
        return None

    def _file(self, place: int) -> int:
        if self._key is None:
            return place
        return int(permutation(len(self.documents.shards), *self._key, self.number)[place])

    def _move(self, number: int, place: int = 0, spot: Spot = START) -> None:
        self.number, self._shard, self._spot, self._stream = number, place, spot, None
        self._rows = self._documents = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the pass, the number of the file in the pass, row and byte."""
        return {
            "pass": self.number,
            "shard": self._shard,
            "row": self._spot.row,
            "offset": self._spot.offset,
            **({"part": self._spot.part} if self._spot.part else {}),
            "rows": self._rows,
            "documents": self._documents,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of a state."""
        self._move(state["pass"], state["shard"], _read_spot(state))
        self._rows, self._documents = state["rows"], state["documents"]


def _read_spot(state: dict[str, Any]) -> Spot:
    return Spot(state["row"], state["offset"], state.get("part", 0))


class Drawn(NamedTuple):
    """A document and the index of its inform."""

    inform: int
    example: Example


class Mark(NamedTuple):
    """A position in a stream.

    Attributes:
        state: state of the documents.
        tallies: statistics of each inform up to the position.
    """

    state: dict[str, Any]
    tallies: list[Tally]


class MixedDocuments:
    """Documents of several informs, epoch after epoch.

    Without shares, an epoch reads each document once: the informs in proportion to their bytes, or
    one after the other if `shuffle` is False. With shares, an inform restarts when all of its
    documents have been read. The first epoch ends with the first inform (`first_exhausted`) or with
    the last (`all_exhausted`), and later epochs have the same number of documents; `restart` has no
    epochs.

    Args:
        passes: the informs.
        shares: shares of the informs, or None.
        stop_strategy: see above.
        seed: seed of the order within a block.
        shuffle: False interleaves the informs evenly.
    """

    def __init__(
        self,
        passes: Sequence[Passes],
        shares: Shares | ScheduledShares | None,
        stop_strategy: str,
        seed: int,
        shuffle: bool,
    ) -> None:
        self.passes, self._shares, self._strategy = passes, shares, stop_strategy
        self._seed, self._shuffle = seed, shuffle
        self._sizes = [max(sum(source_passes.documents.shards), 1) for source_passes in passes]
        self.epoch, self._drawn, self._size = 0, 0, 0
        self._counts, self._ended = [0] * len(passes), [False] * len(passes)
        self._block: tuple[int, list[int]] | None = None

    def at_step(self, step: int) -> None:
        """Set the training step, which determines scheduled shares from the next block on."""
        if isinstance(self._shares, ScheduledShares):
            self._shares.step = step

    def next(self) -> Drawn | None:
        """Return the next document, or None at the end of an epoch; then the next epoch begins."""
        while True:
            if self._is_over():
                return self._next_epoch()
            inform = self._choose()
            example = self.passes[inform].next()
            if example is None:
                self._ended[inform] = True
                continue
            self._counts[inform] += 1
            self._drawn += 1
            return Drawn(inform, example)

    def _choose(self) -> int:
        if self._shares is not None:
            number, place = divmod(self._drawn, self._shares.block)
            if self._block is None or self._block[0] != number:
                key = (_DRAWS, self._seed, number) if self._shuffle else None
                self._block = number, self._shares.block_order(number, key).tolist()
            return self._block[1][place]
        remaining_informs = [i for i, ended in enumerate(self._ended) if not ended]
        if not self._shuffle:
            return remaining_informs[0]
        return min(remaining_informs, key=lambda i: ((2 * self._counts[i] + 1) / self._sizes[i], i))

    def _is_over(self) -> bool:
        if self._shares is None:
            return all(self._ended)
        if self._strategy == "restart":
            return False
        if self.epoch:
            return sum(self._counts) == self._size
        return (any if self._strategy == "first_exhausted" else all)(self._ended)

    def _next_epoch(self) -> None:
        if not any(self._counts):
            raise DataError(
                "the stream has no documents: no row of any inform belongs to this split"
            )
        self.epoch, self._size = self.epoch + 1, sum(self._counts)
        self._counts, self._ended = [0] * len(self.passes), [False] * len(self.passes)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as JSON values."""
        shares = self._shares
        return {
            **({"schedule": shares.state_dict()} if isinstance(shares, ScheduledShares) else {}),
            "epoch": self.epoch,
            "epoch_size": self._size,
            "drawn": self._drawn,
            "counts": list(self._counts),
            "ended": list(self._ended),
            "informs": [source_passes.state_dict() for source_passes in self.passes],
        }

    def mark(self) -> Mark:
        """Return the position and the statistics, for `rewind`."""
        tallies = [
            Tally.from_json(source_passes.documents.tally.as_json())
            for source_passes in self.passes
        ]
        return Mark(self.state_dict(), tallies)

    def rewind(self, mark: Mark) -> None:
        """Return to a mark, if documents after it have been read."""
        if self.state_dict() == mark.state:
            return
        self.load_state_dict(mark.state)
        for source_passes, tally in zip(self.passes, mark.tallies, strict=True):
            source_passes.documents.tally = tally

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of a state."""
        self.epoch, self._size, self._drawn = state["epoch"], state["epoch_size"], state["drawn"]
        self._counts, self._ended = list(state["counts"]), list(state["ended"])
        if isinstance(self._shares, ScheduledShares):
            self._shares.load_state_dict(state["schedule"])
            self._block = None
        for source_passes, passes_state in zip(self.passes, state["informs"], strict=True):
            source_passes.load_state_dict(passes_state)
