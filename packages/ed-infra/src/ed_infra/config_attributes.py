"""Setting attributes where "not given" differs from None. Imports nothing heavy."""

from __future__ import annotations

import re
from typing import Any, Final


class NotGiven:
    """Type of `NOT_GIVEN`; false, and equal to itself only."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "NOT_GIVEN"

    def __reduce__(self) -> str:
        return "NOT_GIVEN"


#: Default of an argument for which None is a value.
NOT_GIVEN: Final = NotGiven()


def set_attrs_smartly(self: Any, attr_name: str, default: Any, new_attr: Any) -> None:
    """Set an attribute to `new_attr`; where that is `NOT_GIVEN`, to `default` if it is missing."""
    if new_attr is not NOT_GIVEN:
        setattr(self, attr_name, new_attr)
    elif not hasattr(self, attr_name):
        setattr(self, attr_name, default)


def extract_commit_hash(resolved_file: str | None, commit_hash: str | None) -> str | None:
    """Return the commit that a file of the Hugging Face cache belongs to.

    Args:
        resolved_file: a path of the form `.../snapshots/<commit>/...`.
        commit_hash: the commit, where it is known already; it is returned as it is.

    Returns:
        40 hexadecimal digits, or None where the path names no commit.
    """
    if commit_hash is not None or resolved_file is None:
        return commit_hash
    found = re.search(r"snapshots/([0-9a-f]{40})(?:/|$)", str(resolved_file).replace("\\", "/"))
    return found.group(1) if found else None
