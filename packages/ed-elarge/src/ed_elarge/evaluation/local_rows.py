"""Rows of local evaluation tasks. An error names the file, the row and the field."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from ed_data import DataError, Inform
from ed_data.errors import did_you_mean
from ed_data.schema import Row
from ed_data.sources import open_source

#: Largest number of rows of a file of a task.
MOST_ROWS = 2**24


def get_rows(files: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """Yield `(place, row)` of the rows of files.

    Raises:
        DataError: A file cannot be read, has a broken row, or the files have no or too many rows.
    """
    count = 0
    for place, row in open_source(Inform(data_files=list(files))).rows():
        count += 1
        if count > MOST_ROWS:
            raise DataError(
                f"{place}: a task has at most {MOST_ROWS} rows: split the files into several tasks"
            )
        yield place, row
    if not count:
        raise DataError(f"{', '.join(files)}: the files have no rows")


def field(place: str, row: Row, name: str) -> Any:
    """Return a field of a row.

    Raises:
        DataError: The row has no such field.
    """
    if row.get(name) is None:
        hint = did_you_mean(name, [key for key in row if key != name])
        raise DataError(f"{place}: the field {name!r} is missing{hint} (fields: {', '.join(row)})")
    return row[name]


def get_text_field(place: str, row: Row, name: str) -> str:
    """Return a text of a row; an empty text is an error."""
    value = field(place, row, name)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{place}: {name} must be a text that is not empty, got {value!r:.80}")
    return value


def identity(place: str, row: Row, name: str) -> str:
    """Return an id of a row: a text or a whole number, as a text."""
    value = field(place, row, name)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise DataError(f"{place}: {name} must be a text or a whole number, got {value!r:.80}")
    return str(value)


def get_number_field(place: str, row: Row, name: str) -> float:
    """Return a finite number of a row; tables store numbers as texts."""
    value = field(place, row, name)
    try:
        parsed_number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        parsed_number = math.nan
    if not math.isfinite(parsed_number):
        raise DataError(f"{place}: {name} must be a finite number, got {value!r:.80}")
    return parsed_number


def get_text_fields(place: str, row: Row, name: str) -> list[str]:
    """Return a list of texts of a row; one text is a list of one."""
    value = field(place, row, name)
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list):
        raise DataError(f"{place}: {name} must be a list of texts, got {value!r:.80}")
    return [
        get_text_field(f"{place}, {name}[{i}]", {name: item}, name) for i, item in enumerate(items)
    ]


def count_examples(count: int, limit: float | None) -> int:
    """Return the number of examples to evaluate: all, `limit`, or a fraction of them."""
    if limit is None:
        return count
    return min(count, max(1, math.ceil(count * limit) if limit < 1 else int(limit)))
