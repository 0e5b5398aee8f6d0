"""Paths of a run file on this machine. A name that no file can have names a missing file."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ed_infra.errors import CheckpointError
from ed_infra.package_files import find_package_file, is_package_address


def expand_path(text: str | Path) -> Path:
    """Return a path whose `~` is the home folder, or the path of a file of an installed package.

    An unknown user is a part of a name.
    """
    if is_package_address(text):
        with suppress(CheckpointError):
            return find_package_file(str(text))
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def is_file(path: str | Path) -> bool:
    """Return whether a file exists. A name that is too long or has a NUL does not exist."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: str | Path) -> bool:
    """Return whether a folder exists; see `is_file`."""
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):
        return False


def exists(path: str | Path) -> bool:
    """Return whether a file or a folder exists; see `is_file`."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False
