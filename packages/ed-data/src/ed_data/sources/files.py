"""Files, local or remote, through fsspec: globs, and copies of remote files."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import fsspec

from ed_data.cache import new_file, remove_abandoned
from ed_data.config.source import COMPRESSIONS, FILE_TYPES, Inform
from ed_data.errors import DataError, did_you_mean, listing
from ed_data.schema import Row
from ed_data.sources.formats import SourceFile, open_rows
from ed_data.sources.lines import START, LineRecord, Spot

log = logging.getLogger("ed_data")
_GLOB = "*?["


@dataclass(frozen=True)
class FileCache:
    """How remote files are read.

    Attributes:
        folder: folder of the copies; None reads remote files in place.
        retries: number of additional attempts after a failure.
        delay: seconds before the first additional attempt; the delay doubles with each attempt.
        expiry: seconds after which a copy is downloaded again; None keeps a copy until the file
            changes.
        streaming: read datasets of the hub without downloading them.
    """

    folder: str | None
    retries: int = 0
    delay: float = 1.0
    expiry: float | None = None
    streaming: bool = False


class FileSource:
    """The files of an inform; the files of each pattern are sorted."""

    def __init__(self, inform: Inform, file_cache: FileCache | str | None = None) -> None:
        self._inform = inform
        self._cache = file_cache if isinstance(file_cache, FileCache) else FileCache(file_cache)
        self.files = [
            file
            for pattern in inform.files
            for file in resolve_files(pattern, inform.label, FILE_TYPES[inform.kind], inform.split)
        ]
        self.shards = [file.size for file in self.files]
        #: Names and sizes, which are equal for copies of the files.
        self.outline = [
            [os.path.basename(file.path), file.size or file.identity] for file in self.files
        ]
        digest = hashlib.blake2b(digest_size=16)
        for file in self.files:
            digest.update(f"{file.address}\0{file.identity}\0".encode())
        self.fingerprint = f"{inform.kind}:{inform.sample_by}:{digest.hexdigest()}"

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[tuple[str, Row]]:
        """Yield the rows of every file.

        Raises:
            DataError: a file does not have the declared type; the message names file and line.
        """
        for shard in range(len(self.files)):
            for record in self.records(shard, columns):
                if isinstance(record.row, DataError):
                    raise record.row
                yield record.place, record.row

    def media_folders(self, shard: int) -> tuple[str, ...]:
        """Return the folder of a file, and the folder that `data_files` names."""
        file = self.files[shard]
        folder = os.path.dirname(file.address)
        return (folder,) if file.folder is None else (folder, file.folder)

    def records(
        self, shard: int, columns: Sequence[str] | None = None, start: Spot = START
    ) -> Iterator[LineRecord]:
        """Yield the records of one file; after a connection error, resume at the same position."""
        file = local_copy(self.files[shard], self._cache)
        failures = 0
        while True:
            try:
                for record in open_rows(self._inform, file, columns, start):
                    yield record
                    start, failures = record.next_spot, 0
                return
            except DataError as error:
                broken = isinstance(error.__cause__, OSError) and not is_local(file.fs)
                if not broken or failures >= self._cache.retries:
                    raise
                _wait(failures, self._cache, error)
                failures += 1


def _wait(failures: int, cache: FileCache, error: Exception) -> None:
    seconds = cache.delay * 2**failures
    log.warning("%s; trying again in %.1f s", error, seconds)
    time.sleep(seconds)


#: Words in the names of files and folders that name a split, as `datasets` reads them.
SPLIT_WORDS = {
    "train": ("train", "training"),
    "test": ("test", "testing", "eval", "evaluation"),
    "validation": ("validation", "valid", "val", "dev"),
}
#: Files that `datasets` writes next to the data: results of `map` and `filter`.
_CACHE_FILE = re.compile(r"(^|/)(cache-[0-9a-f]+[^/]*|tmp[a-z0-9_]+)\.arrow$")


def find_split(path: str) -> str | None:
    """Return the split that a path inside a folder names; None if it names none."""
    words = re.split(r"[^a-z0-9]+", path.lower())
    names = [split for word in words for split, aliases in SPLIT_WORDS.items() if word in aliases]
    return names[0] if names else None


def select_split(paths: Sequence[str], folder: str, split: str, label: str) -> list[str]:
    """Return the files of a folder that are the data of a split.

    Cache files of `datasets` are no data. If files or subfolders name several splits, or only
    another one, the files of `split` are read.

    Raises:
        DataError: the files name splits, and none is `split`.
    """
    data = [path for path in paths if not _CACHE_FILE.search(path)]
    by_path = {path: find_split(path.removeprefix(folder)) for path in data}
    names = {name for name in by_path.values() if name is not None}
    canonical_split = next(
        (name for name, aliases in SPLIT_WORDS.items() if split in aliases), split
    )
    if names and canonical_split not in names:
        raise DataError(
            f"inform {label!r}: the files of the folder {folder!r} belong to the splits "
            f"{', '.join(sorted(names))}, and none to {split!r}: name the files, such as "
            f"data_files: {{{split}: …}}"
        )
    selected_paths = [path for path in data if not names or by_path[path] == canonical_split]
    if len(selected_paths) < len(paths):
        ignored = sorted({*paths} - {*selected_paths})
        log.info(
            "inform %s: %d files of the folder are not read, because they belong to another split "
            "or are caches of datasets; the first: %s",
            label,
            len(ignored),
            ignored[0],
        )
    return selected_paths


def resolve_files(
    pattern: str, label: str, suffixes: Sequence[str] = (), split: str = "train"
) -> list[SourceFile]:
    """Resolve a path, glob, address or folder to its files, sorted.

    Args:
        pattern: a folder means the files of the split with one of the suffixes in it and its
            subfolders, except hidden files; see `select_split`.
        label: name of the inform, for messages.
        suffixes: suffixes of files, optionally followed by that of a compression.
        split: name of the split.

    Raises:
        DataError: the protocol is not installed, or no file matches.
    """
    try:
        fs, path = fsspec.core.url_to_fs(os.path.expanduser(pattern))
    except (ImportError, ValueError) as error:
        raise DataError(f"inform {label!r}: cannot open {pattern!r}: {error}") from error
    try:
        if any(c in path for c in _GLOB) and not fs.exists(path):
            paths = sorted(p for p in fs.glob(path) if fs.isfile(p))
        elif fs.isdir(path):
            ends = tuple(a + b for a in suffixes for b in ("", *COMPRESSIONS))
            inside = (p for p in fs.find(path) if "/." not in p.removeprefix(path))
            paths = sorted(p for p in inside if p.lower().endswith(ends))
            paths = select_split(paths, path, split, label)
            if not paths:
                raise DataError(
                    f"inform {label!r}: the folder {pattern!r} contains no file that ends with "
                    f"{' or '.join(suffixes)}; correct type or data_files"
                )
        else:
            paths = [path] if fs.exists(path) else []
    except OSError as error:
        raise DataError(f"inform {label!r}: cannot open {pattern!r}: {error}") from error
    if not paths:
        raise DataError(f"inform {label!r}: no file matches {pattern!r}{_nearby(fs, path)}")
    folder = _source_address(fs, path) if fs.isdir(path) else None
    return [_source_file(fs, p, folder) for p in paths]


def _source_address(fs: fsspec.AbstractFileSystem, path: str) -> str:
    return path if is_local(fs) else str(fs.unstrip_protocol(path))


def _source_file(fs: fsspec.AbstractFileSystem, path: str, folder: str | None) -> SourceFile:
    if is_local(fs):
        stat = os.stat(path)
        identity = f"{stat.st_size}:{stat.st_mtime_ns}"
        return SourceFile(fs, path, identity, path, stat.st_size, folder)
    about = fs.info(path)
    # The `ukey` of http depends only on the address, so these fields detect changes.
    changes = [str(about[key]) for key in _CHANGES if about.get(key) is not None]
    identity = ":".join([str(fs.ukey(path)), *changes])
    size = int(about.get("size") or 0)
    return SourceFile(fs, path, identity, _source_address(fs, path), size, folder)


_CHANGES = ("ETag", "etag", "LastModified", "last_modified", "mtime")


def local_copy(file: SourceFile, cache: FileCache) -> SourceFile:
    """Return a copy of a remote file, downloaded once until it expires; return local files.

    Raises:
        DataError: the file cannot be downloaded after all attempts.
    """
    if cache.folder is None or is_local(file.fs):
        return file
    key = hashlib.sha256(f"{file.address}\0{file.identity}".encode()).hexdigest()[:24]
    target = Path(cache.folder, key, os.path.basename(file.path))
    fresh = target.exists() and (
        # A clock that jumped back would keep a copy of the future forever.
        cache.expiry is None or abs(time.time() - target.stat().st_mtime) < cache.expiry
    )
    if not fresh:
        remove_abandoned(target.parent)
        with new_file(target) as part:
            _fetch(file, part, cache)
    return replace(file, fs=fsspec.filesystem("file"), path=os.fspath(target))


def _fetch(file: SourceFile, target: Path, cache: FileCache) -> None:
    for failures in range(cache.retries + 1):
        try:
            file.fs.get_file(file.path, os.fspath(target))
            return
        except Exception as error:  # file systems raise the errors of their clients
            if failures == cache.retries:
                raise DataError(f"{file.address} cannot be downloaded: {error}") from error
            _wait(failures, cache, error)


def is_local(fs: fsspec.AbstractFileSystem) -> bool:
    """Return whether a file system is local."""
    protocol = fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
    return protocol in ("file", "local")


def _nearby(fs: fsspec.AbstractFileSystem, path: str) -> str:
    """Return the existing files of the folder, for the message about a missing file."""
    folder, _, name = path.rpartition("/")
    try:
        names = sorted(os.path.basename(p.rstrip("/")) for p in fs.ls(folder, detail=False))
    except (OSError, ValueError):
        return f" (the folder {folder!r} does not exist)"
    if not names:
        return f" (the folder {folder!r} is empty)"
    return f"{did_you_mean(name, names)} (in {folder!r}: {listing(names)})"
