"""Where rows come from: one reader per kind of source, all behind `open_source`.

A source is a stream of rows (dictionaries) and a fingerprint that changes when its data does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from ed_data.config import FILE_TYPES, Inform

Row = dict[str, Any]


class Source(Protocol):
    """What a reader gives back."""

    fingerprint: str

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[Row]:
        """Yield the rows in their stored order; `columns` may spare the reader the others."""
        ...


@dataclass(frozen=True)
class OpenOptions:
    """What a source needs besides its inform: where remote files may be kept (None: nowhere)."""

    file_cache: str | None = None


def open_source(inform: Inform, options: OpenOptions | None = None) -> Source:
    """Open the source of an inform; nothing is read yet beyond listing files.

    Raises:
        DataError: a file, dataset or object does not exist or cannot be opened.
    """
    options = options or OpenOptions()
    kind = inform.kind
    if kind in FILE_TYPES:
        from ed_data.sources.files import FileSource

        return FileSource(inform, options.file_cache)
    if kind == "python":
        from ed_data.sources.python import PythonSource

        return PythonSource(inform)
    from ed_data.sources.hub import HubSource

    return HubSource(inform)


def read_rows(inform: Inform, options: OpenOptions | None = None) -> Iterator[Row]:
    """Yield the rows of an inform as they are stored, at most `num_rows` of them."""
    return islice(open_source(inform, options).rows(), inform.num_rows)
