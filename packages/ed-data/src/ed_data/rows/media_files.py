"""The files of images and recordings that rows name."""

from __future__ import annotations

import os

from ed_data.errors import DataError


def found_file(path: str, folder: str, where: str, *, kind: str, key: str) -> str:
    """Return the absolute path of a file; an address is returned unchanged.

    Args:
        path: relative to the folder, or to the working folder.
        folder: folder of the row's file.
        where: the row, for messages.
        kind: what the file contains, for messages.
        key: the option of the inform that names the field.

    Raises:
        DataError: there is no such file.
    """
    if "://" in path:
        return path
    plain = os.path.expanduser(path)
    for candidate in (os.path.join(folder, plain), plain):
        if os.path.isfile(candidate):
            return os.path.abspath(candidate)
    raise DataError(
        f"{where}: there is no {kind} {path!r}, neither in {folder or '.'!r} nor in the working "
        "folder; correct the path, or set on_error: skip",
        (key,),
    )
