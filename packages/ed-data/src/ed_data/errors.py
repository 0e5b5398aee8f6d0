"""The error of bad data, and the hints that messages give. Imports nothing of ours."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

#: The keys that lead to an option: `("informs", 0, "content_field")`.
KeyPath = tuple[str | int, ...]


class DataError(ValueError):
    """Data is missing, empty, of the wrong kind, or not the data that a run began with.

    The message names the inform, the file and the row, and says what to change.

    Attributes:
        path: the key of the mixture to correct, as far as one is known: whoever read the options
            from a file can point at it.
    """

    def __init__(self, message: str, path: KeyPath = ()) -> None:
        super().__init__(message)
        self.path = path


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """Return `"; did you mean 'x'?"` for the nearest known name, or an empty string.

    Neither case nor the difference between `-` and `_` counts.
    """
    plain = {_plain(k): str(k) for k in known}
    near = difflib.get_close_matches(_plain(name), plain, n=1, cutoff=0.6)
    return f"; did you mean {plain[near[0]]!r}?" if near else ""


def _plain(name: object) -> str:
    return str(name).casefold().replace("-", "_")


def listing(names: Iterable[object], limit: int = 12) -> str:
    """Return names as a comma-separated list, cut after `limit` of them."""
    shown = [str(name) for name in names]
    rest = len(shown) - limit
    return ", ".join(shown[:limit]) + (f", and {rest} more" if rest > 0 else "")
