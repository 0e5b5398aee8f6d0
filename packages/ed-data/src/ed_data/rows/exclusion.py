"""Documents that no batch contains: the file of `mixture.exclude`, and the marks of the documents.

An excluded document keeps its place: it is counted, ordered and packed like every document, so no
other document moves to another batch or row. When a batch is created, the pieces of excluded
documents are omitted, and their rows have more padding. Nothing of the content of an excluded
document reaches the model; only its length has determined the packing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ed_data.errors import DataError

_EXAMPLE = '{"rows": [{"hash": "00c0ffee00c0ffee"}]}'


def read_hashes(path: str) -> NDArray[np.uint64]:
    """Return the hashes of a JSON file, ascending.

    The file is `{"rows": [{"hash": "…"}, …]}`, as `elarge forget` writes it, or a list of hashes.

    Raises:
        DataError: the file does not exist, or has another content.
    """
    try:
        hashes = parse_hashes(Path(path))
    except OSError as error:
        raise DataError(f"cannot read {path!r}: {error}", ("exclude",)) from error
    if not hashes:
        raise DataError(
            f"{path!r} names no documents: the file must have the form {_EXAMPLE}, with hashes of "
            "16 hexadecimal digits; elarge forget writes it",
            ("exclude",),
        )
    return np.unique(np.array([int(one, 16) for one in hashes], np.uint64))


def parse_hashes(path: Path) -> list[str] | None:
    """Return the hashes of a file; None if the file has another content."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError:
        return None
    rows = content.get("rows") if isinstance(content, Mapping) else content
    if not isinstance(rows, list) or not rows:
        return None
    hashes = [row.get("hash") if isinstance(row, Mapping) else row for row in rows]
    valid = all(isinstance(one, str) and re.fullmatch("[0-9a-f]{16}", one) for one in hashes)
    return [str(one) for one in hashes] if valid else None


@dataclass
class Exclusion:
    """Documents that no batch contains.

    Attributes:
        path: the file of their hashes.
        hashes: the hashes, ascending.
        is_present: for each hash, whether a source has the document.
    """

    path: str
    hashes: NDArray[np.uint64]
    is_present: NDArray[np.bool_]

    @classmethod
    def read(cls, path: str) -> Exclusion:
        """Read the file of hashes; see `read_hashes`."""
        hashes = read_hashes(path)
        return cls(path, hashes, np.zeros(len(hashes), bool))

    def mark(self, digests: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return for each document of a source whether it is excluded."""
        self.is_present |= np.isin(self.hashes, digests)
        return np.isin(digests, self.hashes)

    def check_complete(self) -> None:
        """Check that each hash is of a document.

        Raises:
            DataError: no source has a document with one of the hashes.
        """
        missing = [f"{int(one):016x}" for one in self.hashes[~self.is_present]]
        if missing:
            raise DataError(
                f"{self.path!r} names {len(missing)} documents that the training data does not "
                f"contain ({', '.join(missing[:3])}): remove their hashes, or restore the rows",
                ("exclude",),
            )
