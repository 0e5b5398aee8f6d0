"""Where rows come from: one reader per kind of source, all behind `open_source`.

A source is a stream of rows and a fingerprint that changes when its data does. The kinds are the
entries of `ed_data.inform.KINDS`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol

from ed_data.inform import KINDS, Inform
from ed_data.schema import Row


class Source(Protocol):
    """The rows of one inform."""

    fingerprint: str

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[tuple[str, Row]]:
        """Yield (place, row) in the stored order.

        The place is for messages: file and line. `columns` may spare the reader the other fields.
        """
        ...


def open_source(inform: Inform, file_cache: str | None = None) -> Source:
    """Open the source of an inform; a reader of files only lists them so far.

    Args:
        inform: the source.
        file_cache: folder for copies of remote files; None keeps none.

    Raises:
        DataError: a file, dataset or object does not exist or cannot be opened.
    """
    return pkgutil.resolve_name(KINDS[inform.kind].reader)(inform, file_cache)


def read_rows(inform: Inform, file_cache: str | None = None) -> Iterator[Row]:
    """Yield the rows of an inform as they are stored, at most `num_rows` of them."""
    rows = open_source(inform, file_cache).rows()
    return (row for _, row in islice(rows, inform.num_rows))
