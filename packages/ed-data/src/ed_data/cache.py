"""Files and folders of the cache: they appear whole or not at all, whatever is killed meanwhile.

A new one is filled under another name, `.<name>.<random>.part`, and renamed when complete. Whoever
fills it holds a lock on it, which the system releases when the process ends in any way: so an
abandoned one is told from one that is being written, and `remove_abandoned` deletes it at once.
Where the file system has no locks, only remains of a day ago are deleted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from ed_data.errors import DataError

try:
    import fcntl
except ImportError:  # Windows: no such locks
    fcntl = None

_DAY = 86_400.0


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Give a folder to fill; it is renamed to `target` by the caller, and deleted otherwise.

    Raises:
        DataError: the folder around it cannot be written.
    """
    with _writable(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        part, held = _begin(target, is_folder=True)
    try:
        with _writable(target):
            yield part
    finally:
        os.close(held)
        shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """Give a file to write, which then takes the place of `target`.

    Raises:
        DataError: the folder around it cannot be written.
    """
    with _writable(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        part, held = _begin(target, is_folder=False)
    try:
        with _writable(target):
            yield part
            os.replace(part, target)
    finally:
        os.close(held)
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def _writable(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"the cache folder {os.fspath(target.parent)!r} cannot be written: "
            f"{error.strerror or error}; set mixture.cache_dir (or ED_DATA_CACHE) to a folder that "
            "can, or set pack_on_the_fly: true, which writes nothing",
            ("cache_dir",),
        ) from error


def _begin(target: Path, is_folder: bool) -> tuple[Path, int]:
    """Make the part and lock it; returns its path and the descriptor that holds the lock."""
    while True:
        part = target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.part")
        part.mkdir() if is_folder else part.touch()
        # Between the two steps another process may have taken the part for an abandoned one.
        try:
            held = os.open(part, os.O_RDONLY)
        except FileNotFoundError:
            continue
        if _lock(held) is not False and part.exists():
            return part, held
        os.close(held)


def _lock(descriptor: int) -> bool | None:
    """Whether the lock could be taken; None where there are no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def remove_abandoned(folder: Path) -> None:
    """Delete the parts in a folder that no process is filling any more."""
    for part in folder.glob(".*.part"):
        with contextlib.suppress(OSError):  # another process may be deleting it too
            held = os.open(part, os.O_RDONLY)
            try:
                free = _lock(held)
                if free is None:
                    inside = part.iterdir() if part.is_dir() else ()
                    newest = max(path.stat().st_mtime for path in (part, *inside))
                    free = time.time() - newest > _DAY
                if free and part.is_dir():
                    shutil.rmtree(part)
                elif free:
                    part.unlink()
            finally:
                os.close(held)
