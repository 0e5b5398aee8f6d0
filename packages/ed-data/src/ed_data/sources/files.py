"""Files, local or remote, through fsspec: globs, and copies of remote files."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator, Sequence

import fsspec

from ed_data.errors import DataError, did_you_mean, listing
from ed_data.inform import Inform
from ed_data.schema import Row
from ed_data.sources.formats import SourceFile, read_file

_GLOB = "*?["


class FileSource:
    """The files of an inform, one after the other in sorted order of their pattern."""

    def __init__(self, inform: Inform, file_cache: str | None = None) -> None:
        self._inform = inform
        self._cache = file_cache
        self.files = [
            file for pattern in inform.files for file in resolve_files(pattern, inform.label)
        ]
        digest = hashlib.blake2b(digest_size=16)
        for file in self.files:
            digest.update(f"{file.address}\0{file.identity}\0".encode())
        self.fingerprint = f"{inform.kind}:{inform.sample_by}:{digest.hexdigest()}"

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[tuple[str, Row]]:
        """Yield the rows of every file.

        Raises:
            DataError: a file is not of its type; the message names file and line.
        """
        for file in self.files:
            yield from read_file(self._inform, local_copy(file, self._cache), columns)


def resolve_files(pattern: str, label: str) -> list[SourceFile]:
    """Resolve a path, glob or address to its files, sorted.

    Raises:
        DataError: the protocol is not installed, or nothing matches.
    """
    try:
        fs, path = fsspec.core.url_to_fs(os.path.expanduser(pattern))
    except (ImportError, ValueError) as error:
        raise DataError(f"inform {label!r}: cannot open {pattern!r}: {error}") from error
    try:
        if any(c in path for c in _GLOB) and not fs.exists(path):
            paths = sorted(p for p in fs.glob(path) if fs.isfile(p))
        elif fs.isdir(path):
            raise DataError(
                f"inform {label!r}: {pattern!r} is a folder; name its files, for example "
                f"{pattern.rstrip('/')}/*.json"
            )
        else:
            paths = [path] if fs.exists(path) else []
    except OSError as error:
        raise DataError(f"inform {label!r}: cannot open {pattern!r}: {error}") from error
    if not paths:
        raise DataError(f"inform {label!r}: no file matches {pattern!r}{_nearby(fs, path)}")
    return [
        SourceFile(fs, p, _identity(fs, p), p if is_local(fs) else str(fs.unstrip_protocol(p)))
        for p in paths
    ]


def local_copy(file: SourceFile, cache: str | None) -> SourceFile:
    """Return a copy of a remote file under `cache` (made once); the file itself otherwise."""
    if cache is None or is_local(file.fs):
        return file
    key = hashlib.sha256(f"{file.address}\0{file.identity}".encode()).hexdigest()[:24]
    target = os.path.join(cache, key, os.path.basename(file.path))
    if not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        part = f"{target}.{uuid.uuid4().hex}.part"
        try:
            file.fs.get_file(file.path, part)
            os.replace(part, target)
        finally:
            if os.path.exists(part):
                os.unlink(part)
    return SourceFile(fsspec.filesystem("file"), target, file.identity, file.address)


def _identity(fs: fsspec.AbstractFileSystem, path: str) -> str:
    if is_local(fs):
        stat = os.stat(path)
        return f"{stat.st_size}:{stat.st_mtime_ns}"
    return str(fs.ukey(path))


def is_local(fs: fsspec.AbstractFileSystem) -> bool:
    """Whether a file system is this machine's own."""
    protocol = fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
    return protocol in ("file", "local")


def _nearby(fs: fsspec.AbstractFileSystem, path: str) -> str:
    """The files that the folder has instead, for the message about one that it lacks."""
    folder, _, name = path.rpartition("/")
    try:
        names = sorted(os.path.basename(p.rstrip("/")) for p in fs.ls(folder, detail=False))
    except (OSError, ValueError):
        return f" (there is no folder {folder!r})"
    if not names:
        return f" (the folder {folder!r} is empty)"
    return f"{did_you_mean(name, names)} (in {folder!r}: {listing(names)})"
