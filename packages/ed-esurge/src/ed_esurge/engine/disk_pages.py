"""Prefix pages in a directory, which survive a restart of the engine.

An engine writes the pages of its prefix cache when it is shut down, and reads them into host memory
when it starts. A file contains one page of one group. Its folder is a hash of the model, its
weights, the options and the sources; its name is the key of the page, which identifies the whole
prefix. A checksum covers the content. A damaged file is deleted, and its page is computed again.
"""

from __future__ import annotations

import hashlib
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
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
from ed_esurge.runner.functions import PACKAGES
from ed_esurge.runner.host_pages import HostMemory
from ed_esurge.runner.weights import ServedWeights

logger = get_logger(__name__)

_MAGIC = b"ed-page1"
_DIGEST = 32
_SUFFIX = ".page"
THREADS = 4


class DiskPages:
    """The pages of an engine in a directory.

    Args:
        directory: created if it does not exist. Several engines may share a directory.
        most_bytes: limit of all files in the directory. The least recently used are deleted.

    Raises:
        ConfigError: the directory cannot be used.
    """

    def __init__(self, directory: str | Path, most_bytes: int) -> None:
        self._root, self._most = Path(directory).expanduser(), most_bytes
        # Digests by id of the array. References are weak, so that replaced weights are freed.
        self._digests: dict[int, tuple[weakref.ref[jax.Array], bytes]] = {}
        try:
            make_private(self._root)
            check_private(self._root)
        except (OSError, UntrustedFileError) as error:
            raise ConfigError(
                f"prefix_cache_directory {directory} cannot be used ({error}): use a directory of "
                "this user"
            ) from error

    def read(self, loops: Sequence[EngineLoop]) -> int:
        """Copy the stored pages to the host memory of each loop. Return the number of pages."""
        return sum(self._read(loop) for loop in loops)

    def write(self, loops: Sequence[EngineLoop]) -> int:
        """Store the pages of each loop, and delete files beyond the limit.

        Returns:
            the number of new files.
        """
        count = 0
        for loop in loops:
            try:
                count += self._write(loop)
            except OSError as error:
                logger.warning("prefix pages were not stored: %s", error)
        self._delete_oldest()
        return count

    def _folder(self, loop: EngineLoop) -> Path | None:
        """Return the folder of the pages of a loop; None if its model has no hash."""
        weights = loop.runner.weights
        if not isinstance(weights, ServedWeights) or not weights.there:
            return None
        try:
            name = fingerprint(
                weights.graphdefs,
                [str(like) for like in weights.like],
                loop.scheduler.pages.page_size,
                packages=PACKAGES,
                imported=IMPORTED,
            )
        except NoFingerprintError as error:
            logger.warning("prefix pages are not stored: %s", error)
            return None

        with ThreadPoolExecutor(THREADS) as threads:
            parts = b"".join(threads.map(self._digest, weights.leaves))
        return self._root / hashlib.sha256(name.encode() + parts).hexdigest()[:32]

    def _digest(self, leaf: jax.Array) -> bytes:
        """Return the hash of an array, which is computed once."""
        known = self._digests.get(id(leaf))
        if known is not None and known[0]() is leaf:
            return known[1]
        array = np.ascontiguousarray(np.asarray(leaf))
        found = hashlib.blake2b(array.reshape(-1).view(np.uint8).data).digest()
        self._digests[id(leaf)] = weakref.ref(leaf), found
        return found

    def _read(self, loop: EngineLoop) -> int:
        memory, prefixes = loop.runner.host, loop.scheduler.pages.prefixes
        folder = self._folder(loop)
        if (
            not isinstance(memory, HostMemory)
            or prefixes is None
            or folder is None
            or not folder.is_dir()
        ):
            return 0
        check_private(folder)
        count = 0
        for group, index in prefixes.host.items():
            files = self._files(folder, group)[-index.places :]
            for path in files:
                content = self._content(path)
                if content is None:
                    continue
                key = bytes.fromhex(path.name.removesuffix(_SUFFIX))
                place = index.restore(key)
                if place is None or not memory.fill(group, place, content):
                    break
                count += 1
        logger.info("%d prefix pages were read from %s", count, folder)
        return count

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

    def _write(self, loop: EngineLoop) -> int:
        memory, prefixes = loop.runner.host, loop.scheduler.pages.prefixes
        folder = self._folder(loop)
        if not isinstance(memory, HostMemory) or prefixes is None or folder is None or loop.spoilt:
            return 0
        make_private(folder)
        count, now = 0, time.time()
        for group in prefixes.host:
            (folder / _group(group)).mkdir(mode=0o700, exist_ok=True)
            pages = [*_pages(loop, group)]
            # Later pages of a prompt are useless without the earlier, so they are the oldest.
            for age, (key, content) in enumerate(pages):
                path = folder / _group(group) / f"{key.hex()}{_SUFFIX}"
                if not path.exists():
                    data = content()
                    write_private(path, _MAGIC + _checksum(path.name, data) + data)
                    count += 1
                os.utime(path, (now - age / 1000, now - age / 1000))
        return count

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
                path.unlink(missing_ok=True)

    @staticmethod
    def _files(folder: Path, group: str) -> list[Path]:
        """Return the files of a group, the least recently used first."""
        paths = (folder / _group(group)).glob(f"*{_SUFFIX}")
        return sorted(paths, key=lambda path: path.stat().st_mtime)


def _group(name: str) -> str:
    return name or "all"


def _checksum(name: str, content: bytes) -> bytes:
    return hashlib.blake2b(name.encode() + content, digest_size=_DIGEST).digest()


def _pages(loop: EngineLoop, group: str) -> Iterator[tuple[bytes, Callable[[], bytes]]]:
    """Yield the key and a reader of each page: those on the device, then those in host memory."""
    memory, prefixes = loop.runner.host, loop.scheduler.pages.prefixes
    if not isinstance(memory, HostMemory) or prefixes is None:
        return
    device = prefixes.pages_of(group)
    for key, content in zip(device, memory.on_device(group, [*device.values()]), strict=True):
        yield key, partial(bytes, content)
    for key, place in prefixes.host[group].places_of().items():
        if key not in device:
            yield key, partial(memory.content, group, place)
