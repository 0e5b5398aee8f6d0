"""Files that only the user of this process can write."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from ed_infra.errors import EasyDeLError

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UntrustedFileError(EasyDeLError):
    """Another user can write a file or folder."""


def make_private(folder: Path) -> None:
    """Create a folder without access for other users, or remove their access.

    Raises:
        UntrustedFileError: The folder belongs to another user.
        OSError: The folder cannot be created.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check(folder, os.stat(folder), forbidden=0)
    if stat.S_IMODE(os.stat(folder).st_mode) & _OTHERS_WRITE:
        folder.chmod(0o700)


def check_private(folder: Path) -> None:
    """Check that no other user can change the entries of a folder.

    Raises:
        UntrustedFileError: Another user can change them.
        OSError: The folder does not exist.
    """
    _check(folder, os.stat(folder), forbidden=_OTHERS_WRITE)


def read_private(path: Path, *, forbidden: int = _OTHERS_WRITE) -> bytes:
    """Return the contents of a file of this user.

    Args:
        forbidden: bits that the file's mode must not have.

    Raises:
        UntrustedFileError: the file belongs to another user, or others have a forbidden right.
        OSError: there is no such file, or the path is a link.
    """
    # The opened file is checked: the path may name another file by then.
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        _check(path, os.fstat(file.fileno()), forbidden)
        return file.read()


def write_private(path: Path, content: bytes) -> None:
    """Write a file atomically, without read access for other users.

    Raises:
        OSError: the file cannot be written.
    """
    part = path.with_name(f"part.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(part, flags, 0o600), "wb") as file:
            file.write(content)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def user_key(folder: Path) -> bytes:
    """Return a random key of this user, which the first call writes to `folder / "key"`.

    Raises:
        UntrustedFileError: others can read or change the key.
        OSError: the key can be neither read nor written.
    """
    path = folder / "key"
    with suppress(FileNotFoundError):
        return read_private(path, forbidden=0o077)
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"key.{os.getpid()}.{secrets.token_hex(4)}"
    write_private(part, secrets.token_bytes(32))
    with suppress(FileExistsError):  # another process was first
        os.link(part, path)
    part.unlink()
    return read_private(path, forbidden=0o077)


def _check(path: Path, status: os.stat_result, forbidden: int) -> None:
    if status.st_uid != os.geteuid():
        raise UntrustedFileError(
            f"{path} belongs to user {status.st_uid}, and this process runs as {os.geteuid()}: "
            "remove the path, or use another cache folder (XDG_CACHE_HOME)"
        )
    if stat.S_IMODE(status.st_mode) & forbidden:
        raise UntrustedFileError(
            f"{path} has mode {stat.S_IMODE(status.st_mode):o}, which lets other users use the "
            f"path: run chmod go-rwx {path}"
        )
