"""Checksums of the files of a directory: what changed on disk is noticed before it is used.

`checksums.json` beside the files has the length and the CRC-32 of each. A CRC-32 sees every single
flipped bit and every burst of up to 32; files are read in pieces, several at a time.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FILE = "checksums.json"
_PIECE = 1 << 22


def write_checksums(directory: Path, *, skip: Iterable[str] = ()) -> None:
    """Write the checksums of every file below a directory into it.

    Args:
        directory: where the files are; they must be complete.
        skip: names, in the directory itself, of files that still change.
    """
    left_out = {FILE, *skip}
    files = [file for file in sorted(directory.rglob("*")) if file.is_file()]
    names = [file.relative_to(directory).as_posix() for file in files]
    names = [name for name in names if name not in left_out]
    entries = dict(zip(names, _each(directory, names), strict=True))
    temporary = directory / f"{FILE}.new"
    temporary.write_text(json.dumps({"algorithm": "crc32", "files": entries}, indent=0) + "\n")
    temporary.replace(directory / FILE)


def damage(directory: Path, *, part: int = 0, of: int = 1) -> str | None:
    """Compare the files below a directory with their checksums.

    Args:
        directory: where `checksums.json` is.
        part: which part of the files to read, where several processes share the work.
        of: how many parts there are.

    Returns:
        What is wrong with the first file that is not as it was written; None if all are.
    """
    try:
        entries = json.loads((directory / FILE).read_text())["files"]
        wanted = {str(name): (int(size), str(crc)) for name, (size, crc) in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{FILE} cannot be read: {error}"
    names = sorted(wanted)[part::of]
    for name in names:
        file = directory / name
        if not file.is_file():
            return f"{name} is missing"
        if (size := file.stat().st_size) != wanted[name][0]:
            return f"{name} has {size} bytes and was written with {wanted[name][0]}"
    try:
        sums = _each(directory, names)
    except OSError as error:  # a sector that cannot be read
        return str(error)
    for name, (_, crc) in zip(names, sums, strict=True):
        if crc != wanted[name][1]:
            return f"{name} has the checksum {crc} and was written with {wanted[name][1]}"
    return None


def _each(directory: Path, names: list[str]) -> list[tuple[int, str]]:
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda name: _one(directory / name), names))


def _one(file: Path) -> tuple[int, str]:
    size, crc = 0, 0
    with file.open("rb") as stream:
        while piece := stream.read(_PIECE):
            size += len(piece)
            crc = zlib.crc32(piece, crc)
    return size, f"{crc:08x}"
