"""The error of invalid data, and helpers for its messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

#: Path of an option, such as `("informs", 0, "content_field")`.
KeyPath = tuple[str | int, ...]


class DataError(ValueError):
    """Data is missing, empty, of the wrong type, or differs from the data of the resumed run.

    The message contains the inform, the file and the row, and what to change.

    Attributes:
        path: key of the mixture to correct, if known, so that the caller can report its location in
            a file.
    """

    def __init__(self, message: str, path: KeyPath = ()) -> None:
        super().__init__(message)
        self.path = path


def did_you_mean(name: object, known_names: Iterable[object]) -> str:
    """Return `"; did you mean 'x'?"` for the nearest known name, or an empty string.

    Case and the difference between `-` and `_` are ignored.
    """
    names_by_key = {_normalize_name(k): str(k) for k in known_names}
    matches = difflib.get_close_matches(_normalize_name(name), names_by_key, n=1, cutoff=0.6)
    return f"; did you mean {names_by_key[matches[0]]!r}?" if matches else ""


def _normalize_name(name: object) -> str:
    return str(name).casefold().replace("-", "_")


def listing(names: Iterable[object], limit: int = 12) -> str:
    """Return the first `limit` names as a comma-separated list, and the number of others."""
    texts = [str(name) for name in names]
    hidden_count = len(texts) - limit
    return ", ".join(texts[:limit]) + (f", and {hidden_count} more" if hidden_count > 0 else "")
