"""Where rows come from: one reader per kind of source, all behind `open_source`.

A source is a stream of rows and a fingerprint that changes when its data does. The kinds are the
entries of `ed_data.config.source.KINDS`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple, Protocol, runtime_checkable

from ed_data.config.source import KINDS, Inform
from ed_data.schema import Row
from ed_data.sources.files import FileCache
from ed_data.sources.lines import START, Record, Spot


class Source(Protocol):
    """The rows of one inform."""

    fingerprint: str

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[tuple[str, Row]]:
        """Yield (place, row) in the stored order.

        The place is for messages: file and line. `columns` may spare the reader the other fields.
        """
        ...


@runtime_checkable
class ShardedSource(Source, Protocol):
    """A source that can be read from any place on.

    Attributes:
        shards: the sizes of its parts (files), in bytes, in order.
    """

    shards: Sequence[int]

    def records(
        self, shard: int, columns: Sequence[str] | None = None, start: Spot = START
    ) -> Iterator[Record]:
        """Yield the records of one part, from `start` on."""
        ...


class Cursor(NamedTuple):
    """A place in a source: its part, and the place there."""

    shard: int = 0
    spot: Spot = START


def open_source(inform: Inform, file_cache: FileCache | str | None = None) -> Source:
    """Open the source of an inform; a reader of files only lists them so far.

    Args:
        inform: the source.
        file_cache: folder for copies of remote files; None keeps none.

    Raises:
        DataError: a file, dataset or object does not exist or cannot be opened.
    """
    return pkgutil.resolve_name(KINDS[inform.kind].reader)(inform, file_cache)


def read_rows(inform: Inform, file_cache: FileCache | str | None = None) -> Iterator[Row]:
    """Yield the rows of an inform as they are stored, at most `num_rows` of them."""
    rows = open_source(inform, file_cache).rows()
    return (row for _, row in islice(rows, inform.num_rows))


def shard_sizes(source: Source) -> list[int]:
    """The sizes of a source's parts; one part of unknown size where it has none."""
    return list(source.shards) if isinstance(source, ShardedSource) else [0]


def records(
    source: Source, shard: int, columns: Sequence[str] | None = None, start: Spot = START
) -> Iterator[Record]:
    """The records of one part of any source; one that has only `rows` is read from the front."""
    if isinstance(source, ShardedSource):
        yield from source.records(shard, columns, start)
        return
    for number, (place, row) in enumerate(source.rows(columns)):
        if number >= start.row:
            yield Record(place, row, Spot(number), Spot(number + 1))
