"""Which columns of a table are read."""

from __future__ import annotations

from collections.abc import Sequence

from ed_data.rows.template import FIELDS


def present(columns: Sequence[str] | None, names: Sequence[str]) -> list[str] | None:
    """Return the columns of a table to read, or None for all of them.

    The fields of the chat template are optional. If another column is missing, all are read, so
    that the error can list the names.

    Args:
        columns: the wanted columns, or None for all.
        names: the columns of the table.
    """
    if columns is None or not {*columns} - {*FIELDS} <= {*names}:
        return None
    return [name for name in columns if name in names]
