"""Detection of a full disk, and the message about it."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

# The storage library reports a full disk in words, the operating system by number.
_WORDS = ("no space left on device", "disk quota exceeded", "resource_exhausted")
_NUMBERS = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: BaseException | None) -> bool:
    """Return whether an error, or its cause, reports a full disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NUMBERS:
            return True
        if any(words in str(error).lower() for words in _WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False


def room(directory: Path, needed: int) -> str:
    """Describe the required and the free space, and how to free space.

    Args:
        directory: target directory of the write; it need not exist.
        needed: bytes.
    """
    there = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(there).free
    return (
        f"the disk of {there} is full: up to {in_bytes(needed)} are needed, {in_bytes(free)} are "
        "free; free some, or lower save_total_limit"
    )


def in_bytes(size: float) -> str:
    """Format a size: `812 B`, `3.4 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
