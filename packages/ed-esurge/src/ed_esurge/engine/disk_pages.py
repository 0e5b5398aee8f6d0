"""Prefix pages in a directory, which survive a restart of the engine.

An engine writes the pages of its prefix cache when it is shut down, a server also new pages while
it runs, and reads them into host memory when it starts. A file contains one page of one group. Its
folder is a hash of the model, its weights, the options and the sources; its name is the key of the
page, which identifies the whole prefix. A checksum covers the content. A damaged file is deleted,
and its page is computed again.

If the devices of several processes hold a page, each process stores its part, in a folder that
depends on the part. A page is restored if all its parts are there.
"""

from __future__ import annotations

import hashlib
import os
import time
import weakref
from collections.abc import Callable, Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import jax
import numpy as np
from ed_infra.compilation.cache import IMPORTED
from ed_infra.compilation.fingerprint import NoFingerprintError, fingerprint
from ed_infra.compilation.private_files import (
    UntrustedFileError,
    check_private,
    make_private,
    read_private,
    write_private,
)
from ed_infra.errors import ConfigError
from ed_infra.logging import get_logger

from ed_esurge.engine.loop import EngineLoop
from ed_esurge.engine.transport import Transport
from ed_esurge.runner.draft_model import DraftModel
from ed_esurge.runner.functions import SERVING_PACKAGES
from ed_esurge.runner.host_pages import HostMemory
from ed_esurge.runner.weights import ServedWeights

logger = get_logger(__name__)

_MAGIC = b"ed-page1"
_DIGEST = 32
_SUFFIX = ".page"
_THREADS = 4


class DiskPages:
    """The pages of an engine in a directory.

    Args:
        directory: created if it does not exist. Several engines may share a directory.
        most_bytes: limit of all files in the directory. The least recently used are deleted.

    Attributes:
        written: number of files that this object wrote.

    Raises:
        ConfigError: the directory cannot be used.
    """

    def __init__(self, directory: str | Path, most_bytes: int) -> None:
        self._root, self._most = Path(directory).expanduser(), most_bytes
        self.written = 0
        # Digests by id of the array. References are weak, so that replaced weights are freed.
        self._digests: dict[int, tuple[weakref.ref[jax.Array], bytes]] = {}
        self._names: weakref.WeakKeyDictionary[EngineLoop, str] = weakref.WeakKeyDictionary()
        # Group and key of the pages in the files of the present weights, equal in all processes.
        self._stored: dict[Path, set[tuple[str, bytes]]] = {}
        try:
            make_private(self._root)
            check_private(self._root)
        except (OSError, UntrustedFileError) as error:
            raise ConfigError(
                f"prefix_cache_directory {directory} cannot be used ({error}): use a directory of "
                "this user"
            ) from error

    def read(self, loop: EngineLoop, transport: Transport) -> None:
        """Copy the stored pages to the host memory of a loop. A collective operation.

        Args:
            loop: the loop, which may run in other processes.
            transport: connection to the other processes, which restore the same pages.
        """
        prefixes = loop.scheduler.pages.prefixes
        if prefixes is None:
            return
        folder, memory = self._folder(loop), loop.runner.host
        local_files = self._list_stored_files(loop, folder)
        names = (
            None
            if local_files is None
            else {group: [*files] for group, files in local_files.items()}
        )
        names_by_process = [one for one in transport.gather(names) if one is not None]
        if not names_by_process:
            return
        damaged: list[list[str]] = []
        count = 0
        for group, index in prefixes.host.items():
            lists = [process_names.get(group, []) for process_names in names_by_process]
            common = set(lists[0]).intersection(*lists[1:])
            for name in [name for name in lists[0] if name in common][-index.places :]:
                place = index.restore(_key(name))
                if place is None:
                    break
                count += 1
                if local_files is None or not isinstance(memory, HostMemory):
                    continue
                content = self._content(local_files[group][name])
                if content is None or not memory.fill(group, place, content):
                    damaged.append([group, name])
        lost = {(group, name) for one in transport.gather(damaged) for group, name in one}
        for group, name in sorted(lost):
            prefixes.host[group].discard(_key(name))
        if folder is not None:
            self._stored.setdefault(folder, set()).update(
                (group, key) for group, index in prefixes.host.items() for key in index.get_places()
            )
        logger.info("%d prefix pages were read from %s", count - len(lost), self._root)

    def write(self, loop: EngineLoop, most_bytes: int | None = None) -> None:
        """Store the pages of a loop, and delete files beyond the limit; see `StorePages`."""
        written = self.written
        self._write(loop, most_bytes)
        if most_bytes is None or self.written > written:
            self._delete_oldest()

    def _folder(self, loop: EngineLoop) -> Path | None:
        """Return the folder of the pages of a loop; None if its model has no hash."""
        weights, memory = loop.runner.weights, loop.runner.host
        if (
            not isinstance(weights, ServedWeights)
            or not isinstance(memory, HostMemory)
            or not weights.there
        ):
            return None
        proposer, used = loop.scheduler.proposer, [weights]
        if isinstance(proposer, DraftModel):  # a page contains its keys and values
            used.append(proposer.runner.weights)
        name = self._names.get(loop)
        if name is None:
            try:
                name = fingerprint(
                    [served_weights.graphdefs for served_weights in used],
                    [str(like) for served_weights in used for like in served_weights.like],
                    loop.scheduler.pages.page_size,
                    memory.parts(),
                    packages=SERVING_PACKAGES,
                    imported=IMPORTED,
                )
            except NoFingerprintError as error:
                logger.warning("prefix pages are not stored: %s", error)
                return None
            self._names[loop] = name

        with ThreadPoolExecutor(_THREADS) as threads:
            leaves = [leaf for served_weights in used for leaf in served_weights.leaves]
            parts = b"".join(threads.map(self._digest, leaves))
        return self._root / hashlib.sha256(name.encode() + parts).hexdigest()[:32]

    def _digest(self, leaf: jax.Array) -> bytes:
        """Return the hash of an array, or of its parts in this process, which is computed once."""
        cache_entry = self._digests.get(id(leaf))
        if cache_entry is not None and cache_entry[0]() is leaf:
            return cache_entry[1]
        parts = {str(part.index): part.data for part in leaf.addressable_shards}
        hashes = []
        for _, part in sorted(parts.items()):
            array = np.ascontiguousarray(np.asarray(part))
            hashes.append(hashlib.blake2b(array.reshape(-1).view(np.uint8).data).digest())
        digest = hashes[0] if len(hashes) == 1 else hashlib.sha256(b"".join(hashes)).digest()
        self._digests[id(leaf)] = weakref.ref(leaf), digest
        return digest

    def _list_stored_files(
        self, loop: EngineLoop, folder: Path | None
    ) -> dict[str, dict[str, Path]] | None:
        """Return the files of each group by name, the least recently used first; None if other
        processes hold all pages of the loop.

        Args:
            folder: the folder of the pages of the loop, see `_folder`.
        """
        if not isinstance(loop.runner.host, HostMemory) or loop.scheduler.pages.prefixes is None:
            return None
        if folder is None or not folder.is_dir():
            return {}
        check_private(folder)
        return {
            group: {path.name: path for path in self._files(folder, group)}
            for group in loop.scheduler.pages.prefixes.host
        }

    @staticmethod
    def _content(path: Path) -> bytes | None:
        """Return the verified content of a file; None for a damaged file, which is deleted."""
        try:
            data = read_private(path)
        except (OSError, UntrustedFileError):
            return None
        start = len(_MAGIC) + _DIGEST
        if data[:start] == _MAGIC + _checksum(path.name, data[start:]):
            return data[start:]
        logger.warning("the prefix page %s is damaged and was deleted", path)
        path.unlink(missing_ok=True)
        return None

    def _write(self, loop: EngineLoop, most_bytes: int | None) -> None:
        prefixes = loop.scheduler.pages.prefixes
        if prefixes is None or loop.spoilt or (folder := self._folder(loop)) is None:
            return
        if folder not in self._stored:
            self._stored = {folder: set()}  # other weights
        stored = self._stored[folder]
        now, failed = time.time(), False
        remaining_bytes = most_bytes
        for group in prefixes.host:
            pages = _pages(loop, group, () if most_bytes is None else stored)
            # Later pages of a prompt are useless without the earlier, so they are the oldest.
            for age, (key, size, content) in enumerate(pages):
                # All processes read the same pages of the device, also after an error of one disk.
                stored.add((group, key))
                if not failed:
                    path = folder / _group(group) / f"{key.hex()}{_SUFFIX}"
                    try:
                        self._write_page(path, content)
                        os.utime(path, (now - age / 1000, now - age / 1000))
                    except (OSError, UntrustedFileError) as error:
                        logger.warning("prefix pages were not stored: %s", error)
                        failed = True
                if remaining_bytes is not None:
                    remaining_bytes -= size
                    if remaining_bytes <= 0:
                        return

    def _write_page(self, path: Path, content: Callable[[], bytes]) -> None:
        if path.exists():
            return
        make_private(path.parent.parent)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        data = content()
        write_private(path, _MAGIC + _checksum(path.name, data) + data)
        self.written += 1

    def _delete_oldest(self) -> None:
        files = []
        for path in self._root.glob(f"*/*/*{_SUFFIX}"):
            with suppress(OSError):
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        total = 0
        for _, size, path in sorted(files, reverse=True):
            total += size
            if total > self._most:
                with suppress(OSError):
                    path.unlink()

    @staticmethod
    def _files(folder: Path, group: str) -> list[Path]:
        """Return the files of a group, the least recently used first."""
        paths = (folder / _group(group)).glob(f"*{_SUFFIX}")
        return sorted(paths, key=lambda path: path.stat().st_mtime)


def _group(name: str) -> str:
    return name or "all"


def _key(name: str) -> bytes:
    """Return the key of the page in a file."""
    return bytes.fromhex(name.removesuffix(_SUFFIX))


def _checksum(name: str, content: bytes) -> bytes:
    return hashlib.blake2b(name.encode() + content, digest_size=_DIGEST).digest()


def _pages(
    loop: EngineLoop, group: str, stored: Container[tuple[str, bytes]]
) -> Iterator[tuple[bytes, int, Callable[[], bytes]]]:
    """Yield the key, the number of bytes and a reader of each page: those on the device, then those
    in host memory.

    Args:
        stored: group and key of pages that are omitted.
    """
    memory, prefixes = loop.runner.host, loop.scheduler.pages.prefixes
    if not isinstance(memory, HostMemory) or prefixes is None:
        return
    device, size = prefixes.get_pages(group), memory.page_bytes(group)
    new = {key: page for key, page in device.items() if (group, key) not in stored}
    for key, content in zip(new, memory.on_device(group, [*new.values()]), strict=True):
        yield key, size, partial(bytes, content)
    for key, place in prefixes.host[group].get_places().items():
        if key not in device and (group, key) not in stored:
            yield key, size, partial(memory.content, group, place)
