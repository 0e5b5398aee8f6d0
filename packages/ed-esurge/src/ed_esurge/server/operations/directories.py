"""Paths of clients inside a directory of the server."""

from __future__ import annotations

from pathlib import Path

from ed_esurge.server.http.errors import APIError


def inside(directory: Path, client_path: str, kind: str, param: str) -> Path:
    """Return the resolved path of a directory inside a directory of the server.

    Args:
        directory: the directory of the server.
        client_path: the path of the client, relative to `directory`.
        kind: what the directory contains, for the errors.
        param: name of the field with the path.

    Raises:
        APIError: 403, the path or a link in it is outside; 404, the directory does not exist.
    """
    root = path = directory.resolve()
    try:
        path = (root / client_path).resolve()
        within = path.is_relative_to(root) and path != root
        there = within and path.is_dir()
        # The files may be links too.
        strays = there and any(
            not file.resolve().is_relative_to(root) for file in path.iterdir() if file.is_symlink()
        )
    except (OSError, ValueError, RuntimeError):  # too long, a zero byte, a loop of links
        within = there = strays = False
    if not within or strays:
        raise APIError(
            f"{client_path!r:.200} is not inside the {kind} directory of this server: send a path "
            "relative to this directory",
            status=403,
            param=param,
        )
    if not there:
        raise APIError(
            f"the {kind} directory {client_path!r:.200} does not exist", status=404, param=param
        )
    return path
