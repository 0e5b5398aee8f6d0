"""Files, local or remote, through fsspec: globs, compression, and copies of remote files."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import fsspec
from fsspec.utils import infer_compression

from ed_data.config import COMPRESSIONS, Inform
from ed_data.errors import DataError, did_you_mean, listing

Row = dict[str, Any]
_GLOB = "*?["


@dataclass(frozen=True)
class SourceFile:
    """One file: its file system and path, and an identity that changes when it is rewritten."""

    fs: Any
    path: str
    identity: str

    @property
    def address(self) -> str:
        """The path as messages show it."""
        return self.path if is_local(self.fs) else str(self.fs.unstrip_protocol(self.path))

    def open(self, *, decompress: bool = True) -> IO[bytes]:
        """Open for reading bytes; compression is told from the suffix."""
        compression = infer_compression(self.path) if decompress else None
        if decompress and compression is None and self.path.endswith(COMPRESSIONS):
            suffix = self.path.rpartition(".")[2]
            raise DataError(
                f"{self.address}: reading .{suffix} files needs a package that is not installed"
                + (" (zstandard)" if suffix == "zst" else "")
            )
        return fsspec.core.OpenFile(self.fs, self.path, "rb", compression=compression).open()


class FileSource:
    """The files of an inform, one after the other in sorted order of their pattern."""

    def __init__(self, inform: Inform, file_cache: str | None) -> None:
        self._inform = inform
        self._cache = file_cache
        self.files = [
            file for pattern in inform.files for file in resolve_files(pattern, inform.label)
        ]
        digest = hashlib.blake2b(digest_size=16)
        for file in self.files:
            digest.update(f"{file.address}\0{file.identity}\0".encode())
        self.fingerprint = f"{inform.kind}:{inform.sample_by}:{digest.hexdigest()}"

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[Row]:
        """Yield the rows of every file.

        Raises:
            DataError: a file is not what its type says; the message names file and line.
        """
        from ed_data.sources.formats import read_file

        for file in self.files:
            yield from read_file(
                self._inform.kind,
                local_copy(file, self._cache),
                columns=columns,
                content_field=self._inform.content_field,
                sample_by=self._inform.sample_by,
            )


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
    return [SourceFile(fs, p, _identity(fs, p)) for p in paths]


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
    return SourceFile(fsspec.filesystem("file"), target, file.identity)


def _identity(fs: Any, path: str) -> str:
    if is_local(fs):
        stat = os.stat(path)
        return f"{stat.st_size}:{stat.st_mtime_ns}"
    return str(fs.ukey(path))


def is_local(fs: Any) -> bool:
    """Whether a file system is this machine's own."""
    protocol = fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
    return protocol in ("file", "local")


def _nearby(fs: Any, path: str) -> str:
    """What is in the folder instead, for the message about a file that is not there."""
    folder, _, name = path.rpartition("/")
    try:
        found = sorted(os.path.basename(p.rstrip("/")) for p in fs.ls(folder, detail=False))
    except (OSError, ValueError):
        return f" (there is no folder {folder!r})"
    if not found:
        return f" (the folder {folder!r} is empty)"
    return f"{did_you_mean(name, found)} (in {folder!r}: {listing(found)})"
