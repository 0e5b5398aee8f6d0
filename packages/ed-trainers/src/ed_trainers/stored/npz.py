"""Safe reading of `.npz` files, whose compressed members may expand without limit."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import IO

import numpy as np
from ed_infra.errors import ConfigError

#: Maximum size of all arrays of a file after decompression, in bytes.
MAX_BYTES = 2**34


def read_npz(source: Path | IO[bytes], name: str) -> dict[str, np.ndarray]:
    """Return the arrays of an `.npz` file.

    Args:
        name: name of the file, for errors.

    Raises:
        ConfigError: the file is damaged, or its arrays are larger than `MAX_BYTES`.
    """
    try:
        with zipfile.ZipFile(source) as archive:
            size = sum(member.file_size for member in archive.infolist())
    except zipfile.BadZipFile as error:
        raise ConfigError(f"{name} is damaged ({error}): delete it, or restore a copy") from error
    if size > MAX_BYTES:
        raise ConfigError(
            f"{name} expands to {size} bytes, and at most {MAX_BYTES} are read: the file is "
            "damaged or hostile; delete it, or restore a copy"
        )
    if not isinstance(source, Path):
        source.seek(0)
    with np.load(source, allow_pickle=False) as arrays:
        return {key: arrays[key] for key in arrays.files}
