"""Checksums of the files of a directory, which reveal every change on disk before a file is used.

`checksums.json` in the directory contains the length and the CRC-32 of each file. A CRC-32 detects
every single flipped bit and every burst of up to 32; files are read in pieces, several files in
parallel. The text of `checksums.json` has exactly one valid form, so a flipped bit in the text is
also detected.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CHECKSUMS_FILE = "checksums.json"
_ALGORITHM = "crc32"
_PIECE = 1 << 22


def write_checksums(directory: Path, *, skip: Iterable[str] = ()) -> None:
    """Write the checksums of every file below a directory.

    Args:
        directory: directory of the files, which must be complete.
        skip: names of files in the directory itself that still change.
    """
    left_out = {CHECKSUMS_FILE, *skip}
    files = [file for file in sorted(directory.rglob("*")) if file.is_file()]
    names = [file.relative_to(directory).as_posix() for file in files]
    names = [name for name in names if name not in left_out]
    _write(directory, dict(zip(names, _each(directory, names), strict=True)))


def add_checksums(directory: Path, names: Iterable[str]) -> None:
    """Add the checksums of files that `write_checksums` skipped and that are now complete.

    Args:
        directory: directory with `checksums.json`.
        names: names of the files in the directory; a name without a file is ignored.
    """
    there = [name for name in names if (directory / name).is_file()]
    entries = _read(directory) | dict(zip(there, _each(directory, there), strict=True))
    _write(directory, entries)


def damage(directory: Path, *, part: int = 0, of: int = 1) -> str | None:
    """Compare the files below a directory with their checksums.

    Args:
        directory: directory with `checksums.json`.
        part: the share of the files to read, if several processes share the work.
        of: number of shares.

    Returns:
        A description of the first changed file; None if no file changed.
    """
    try:
        expected_files = _read(directory)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{CHECKSUMS_FILE} cannot be read: {error}"
    # Files of the directory itself come last: `add_checksums` does not change the shares of the
    # others.
    names = sorted(expected_files, key=lambda name: ("/" not in name, name))[part::of]
    for name in names:
        file = directory / name
        if not file.is_file():
            return f"{name} is missing"
        if (size := file.stat().st_size) != expected_files[name][0]:
            return f"{name} has {size} bytes and was written with {expected_files[name][0]}"
    try:
        sums = _each(directory, names)
    except OSError as error:  # an unreadable sector
        return str(error)
    for name, (_, crc) in zip(names, sums, strict=True):
        if crc != expected_files[name][1]:
            return f"{name} has the checksum {crc} and was written with {expected_files[name][1]}"
    return None


def _read(directory: Path) -> dict[str, tuple[int, str]]:
    """Return the entries of `checksums.json`.

    Raises:
        ValueError: the text changed since it was written.
    """
    text = (directory / CHECKSUMS_FILE).read_bytes().decode()
    content = json.loads(text)
    entries = {str(name): (int(size), str(crc)) for name, (size, crc) in content["files"].items()}
    if text != _text(entries):
        raise ValueError("the file changed since it was written")
    return entries


def _write(directory: Path, entries: dict[str, tuple[int, str]]) -> None:
    temporary = directory / f"{CHECKSUMS_FILE}.new"
    try:
        temporary.write_text(_text(entries))
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    temporary.replace(directory / CHECKSUMS_FILE)


def _text(entries: dict[str, tuple[int, str]]) -> str:
    """Return the only valid text of these entries."""
    return json.dumps({"algorithm": _ALGORITHM, "files": entries}, indent=0) + "\n"


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
