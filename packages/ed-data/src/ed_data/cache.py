"""Atomic files and folders of the cache: readers never see an incomplete one.

A new file or folder is written under the name `.<name>.<random>.part` and renamed when complete.
The writer holds a lock on it, which the operating system releases when the process ends. The lock
distinguishes abandoned parts from those being written, and `remove_abandoned` deletes abandoned
parts immediately. On file systems without locks, it deletes parts older than one day.
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
except ImportError:  # Windows has no such locks
    fcntl = None

_DAY = 86_400.0


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder, which the caller fills and renames to `target`.

    The temporary folder is deleted if the caller does not rename it.

    Raises:
        DataError: the parent folder is not writable.
    """
    with _writable(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        part, lock_fd = _begin(target, is_folder=True)
    try:
        with _writable(target):
            yield part
    finally:
        os.close(lock_fd)
        shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """Yield a temporary file, which replaces `target` at the end of the block.

    Raises:
        DataError: the parent folder is not writable.
    """
    with _writable(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        part, lock_fd = _begin(target, is_folder=False)
    try:
        with _writable(target):
            yield part
            os.replace(part, target)
    finally:
        os.close(lock_fd)
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def _writable(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"the cache folder {os.fspath(target.parent)!r} cannot be written: "
            f"{error.strerror or error}; set mixture.cache_dir (or ED_DATA_CACHE) to a writable "
            "folder, or set pack_on_the_fly: true, which writes nothing",
            ("cache_dir",),
        ) from error


def _begin(target: Path, is_folder: bool) -> tuple[Path, int]:
    """Create and lock a part; return its path and the descriptor of the lock."""
    while True:
        part = target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.part")
        part.mkdir() if is_folder else part.touch()
        # Before the lock is held, another process may delete the part as abandoned.
        try:
            lock_fd = os.open(part, os.O_RDONLY)
        except FileNotFoundError:
            continue
        if _lock(lock_fd) is not False and part.exists():
            return part, lock_fd
        os.close(lock_fd)


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Wait for the lock of an existing folder, and hold the lock in the block.

    On file systems without locks, nothing is excluded.
    """
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, *, wait: bool = False) -> bool | None:
    """Return whether the lock was acquired; None if the file system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def remove_abandoned(folder: Path) -> None:
    """Delete the parts in a folder that no process is writing."""
    for part in folder.glob(".*.part"):
        with contextlib.suppress(OSError):  # another process may delete the part at the same time
            lock_fd = os.open(part, os.O_RDONLY)
            try:
                free = _lock(lock_fd)
                if free is None:
                    inside = part.iterdir() if part.is_dir() else ()
                    newest = max(path.stat().st_mtime for path in (part, *inside))
                    free = time.time() - newest > _DAY
                if free and part.is_dir():
                    shutil.rmtree(part)
                elif free:
                    part.unlink()
            finally:
                os.close(lock_fd)
