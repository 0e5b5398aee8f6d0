"""What goes wrong with data, said once and clearly. Imports nothing of ours."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DataError(ValueError):
    """Data is missing, empty, of the wrong kind, or not the data that a run began with.

    The message says which inform, what was found, and what to change.
    """


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """Return `"; did you mean 'x'?"` for the nearest known name, or an empty string."""
    near = difflib.get_close_matches(str(name), [str(k) for k in known], n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def listing(names: Iterable[object], limit: int = 12) -> str:
    """Return names as a comma-separated list, cut after `limit` of them."""
    shown = [str(name) for name in names]
    rest = len(shown) - limit
    return ", ".join(shown[:limit]) + (f", and {rest} more" if rest > 0 else "")
