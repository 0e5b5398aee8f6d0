"""Sources of rows: one reader per kind of source, opened with `open_source`.

A source has a stream of rows, and a fingerprint that changes with its data. The kinds are the
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
from ed_data.sources.lines import START, LineRecord, Spot


class Source(Protocol):
    """The rows of one inform."""

    fingerprint: str

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[tuple[str, Row]]:
        """Yield (place, row) in the stored order.

        The place (file and line) is for messages. A reader may skip fields that are not in
        `columns`.
        """
        ...


@runtime_checkable
class ShardedSource(Source, Protocol):
    """A source that can be read from any position.

    Attributes:
        shards: size of each shard (file) in bytes.
    """

    shards: Sequence[int]

    def records(
        self, shard: int, columns: Sequence[str] | None = None, start: Spot = START
    ) -> Iterator[LineRecord]:
        """Yield the records of one shard, starting at `start`."""
        ...


@runtime_checkable
class FolderSource(Protocol):
    """A source whose rows may name files in folders."""

    def media_folders(self, shard: int) -> Sequence[str]:
        """Return the folders, paths or addresses, whose files the rows of a shard may name.

        Paths of rows are relative to the first folder.
        """
        ...


class Cursor(NamedTuple):
    """A position in a source: the shard, and the position in the shard."""

    shard: int = 0
    spot: Spot = START


def open_source(inform: Inform, file_cache: FileCache | str | None = None) -> Source:
    """Open the source of an inform; a reader of files lists the files without reading them.

    Args:
        inform: options of the source.
        file_cache: folder for copies of remote files; None keeps no copies.

    Raises:
        DataError: a file, dataset or object does not exist or cannot be opened.
    """
    return pkgutil.resolve_name(KINDS[inform.kind].reader)(inform, file_cache)


def read_rows(inform: Inform, file_cache: FileCache | str | None = None) -> Iterator[Row]:
    """Yield the unprocessed rows of an inform, at most `num_rows`."""
    rows = open_source(inform, file_cache).rows()
    return (row for _, row in islice(rows, inform.num_rows))


def shard_sizes(source: Source) -> list[int]:
    """Return the sizes of a source's shards; other sources are one shard of unknown size."""
    return list(source.shards) if isinstance(source, ShardedSource) else [0]


def records(
    source: Source, shard: int, columns: Sequence[str] | None = None, start: Spot = START
) -> Iterator[LineRecord]:
    """Yield the records of one shard of any source, starting at `start`."""
    if isinstance(source, ShardedSource):
        yield from source.records(shard, columns, start)
        return
    for number, (place, row) in enumerate(source.rows(columns)):
        if number >= start.row:
            yield LineRecord(place, row, Spot(number), Spot(number + 1))
