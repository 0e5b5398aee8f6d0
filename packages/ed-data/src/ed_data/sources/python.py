"""Text that an importable object holds: `data_files: "pydoc_data.topics:topics"`."""

from __future__ import annotations

import hashlib
import json
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ed_data.config import Inform
from ed_data.errors import DataError

Row = dict[str, Any]


class PythonSource:
    """A string, a list of strings or rows, or a dictionary of strings (rows get its key)."""

    def __init__(self, inform: Inform) -> None:
        address = str(inform.data_files)
        self._rows = list(_as_rows(resolve(address, inform.label), inform, address))
        digest = hashlib.blake2b(digest_size=16)
        for row in self._rows:
            digest.update(json.dumps(row, sort_keys=True, default=repr).encode())
        self.fingerprint = f"python:{digest.hexdigest()}"

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[Row]:
        """Yield the rows, in the order of the object."""
        return iter(self._rows)


def resolve(address: str, label: str) -> Any:
    """Return the object at `"module:attribute"`.

    Raises:
        DataError: the module or the attribute does not exist.
    """
    if ":" not in address:
        raise DataError(f"inform {label!r}: {address!r} is not of the form 'module:attribute'")
    try:
        return pkgutil.resolve_name(address)
    except (ImportError, AttributeError, ValueError) as error:
        raise DataError(f"inform {label!r}: cannot import {address!r}: {error}") from error


def _as_rows(value: Any, inform: Inform, address: str) -> Iterator[Row]:
    field = inform.content_field
    if isinstance(value, str):
        yield {field: value}
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(item, str):
                raise _wrong(inform, address, f"its value at {key!r} is a {type(item).__name__}")
            yield {"name": str(key), field: item}
    elif isinstance(value, Sequence):
        for index, item in enumerate(value):
            if isinstance(item, str):
                yield {field: item}
            elif isinstance(item, Mapping):
                yield dict(item)
            else:
                raise _wrong(inform, address, f"its item {index} is a {type(item).__name__}")
    else:
        raise _wrong(inform, address, f"it is a {type(value).__name__}")


def _wrong(inform: Inform, address: str, found: str) -> DataError:
    return DataError(
        f"inform {inform.label!r}: {address!r} must be a string, a list of strings (or rows), or "
        f"a dictionary of strings, but {found}"
    )
