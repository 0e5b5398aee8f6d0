"""Copies of complete checkpoints on an object store, through fsspec.

The copy of a checkpoint is `<address>/<step>`: its files, the record of the metrics, and at last
`checksums.json`. A copy without `checksums.json` is incomplete and never read. A copy that was
downloaded is compared with its checksums before it becomes a checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import fsspec
from ed_infra.errors import CheckpointError, ConfigError

from ed_trainers.stored import checksums, disk

#: Protocols without folders, whose `makedirs` would create a missing bucket.
_BUCKETS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"}
_COPY = "mirror-copy"
#: Files that are copied at the same time.
_PARALLEL = 8


def _list_protocols(protocol: str | Sequence[str]) -> Sequence[str]:
    return [protocol] if isinstance(protocol, str) else protocol


class Mirror:
    """The copies of one run's checkpoints; the main process of the run has it.

    Args:
        address: folder of the copies, as an address that fsspec supports.
        record: name of the file of metrics in the parent of the checkpoints' directory.
        say: prints a message.

    Raises:
        ConfigError: the protocol of the address is unknown or not installed.
    """

    def __init__(self, address: str, record: str, say: Callable[[str], None]):
        try:
            self._fs, self._root = fsspec.core.url_to_fs(address)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"mirror_address {address!r} cannot be opened: {error}") from error
        self.address = address
        #: Why the last copy failed; None if it is complete.
        self.failed: str | None = None
        self._record, self._say = record, say
        self._pool: ThreadPoolExecutor | None = None
        self._pushes: dict[int, Future[None]] = {}

    def pending(self) -> set[int]:
        """Return the steps whose copies are not complete yet."""
        return {step for step, push in [*self._pushes.items()] if not push.done()}

    def push(
        self, checkpoint: Path, select_kept_steps: Callable[[Sequence[int]], set[int]]
    ) -> None:
        """Copy a complete checkpoint in the background, then delete the copies that do not stay.

        A failure is reported, and recorded in `failed`.

        Args:
            checkpoint: directory with the step as its name; it must stay while it is pending.
            select_kept_steps: selects the steps that stay.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "mirror")
        step = int(checkpoint.name)
        record = checkpoint.parent.parent / self._record
        rows = record.read_bytes() if record.exists() else b""
        self._pushes[step] = self._pool.submit(self._push, checkpoint, rows, select_kept_steps)

    def _push(
        self, checkpoint: Path, rows: bytes, select_kept_steps: Callable[[Sequence[int]], set[int]]
    ) -> None:
        step = int(checkpoint.name)
        try:
            self._upload(checkpoint, rows)
            there = [*self._list_copies()]
            for obsolete_step in set(there) - select_kept_steps(there):
                self._remove(obsolete_step)
        except Exception as error:  # each protocol has its own types of errors
            # The rest of a copy would fill the store, and the copies of later steps need the space.
            with suppress(Exception):
                if not self._fs.exists(f"{self._root}/{step}/{checksums.CHECKSUMS_FILE}"):
                    self._remove(step)
            self.failed = (
                f"checkpoint {step} could not be copied to {self.address} "
                f"({type(error).__name__}: {error}); {checkpoint} is intact: run the same command "
                "again, with another mirror_address if necessary"
            )
            self._say(self.failed)
        else:
            self.failed = None
            self._say(f"checkpoint {step} was copied to {self.address}")

    def _upload(self, checkpoint: Path, rows: bytes) -> None:
        target = f"{self._root}/{checkpoint.name}"
        if self._fs.exists(target):
            self._remove(int(checkpoint.name))
        files = {
            path.relative_to(checkpoint).as_posix(): path
            for path in sorted(checkpoint.rglob("*"))
            if path.is_file()
        }
        last = files.pop(checksums.CHECKSUMS_FILE)
        if _BUCKETS.isdisjoint(_list_protocols(self._fs.protocol)):
            for name in {f"{target}/{name}".rpartition("/")[0] for name in files}:
                self._fs.makedirs(name, exist_ok=True)
        with ThreadPoolExecutor(_PARALLEL) as pool:
            list(pool.map(lambda name: self._put(files[name], f"{target}/{name}"), files))
        self._fs.pipe_file(f"{target}/{self._record}", rows)
        self._put(last, f"{target}/{checksums.CHECKSUMS_FILE}")

    def _put(self, source: Path, target: str) -> None:
        self._fs.put_file(str(source), target)
        self._fs.invalidate_cache(target.rpartition("/")[0])
        remote_size, size = self._fs.info(target)["size"], source.stat().st_size
        if remote_size != size:
            raise OSError(f"{target} has {remote_size} bytes instead of {size}")

    def _remove(self, step: int) -> None:
        """Delete a copy; the checksums go first, so that a partial copy is never complete."""
        folder = f"{self._root}/{step}"
        if self._fs.exists(f"{folder}/{checksums.CHECKSUMS_FILE}"):
            self._fs.rm_file(f"{folder}/{checksums.CHECKSUMS_FILE}")
        self._fs.rm(folder, recursive=True)
        self._fs.invalidate_cache()

    def _list_copies(self) -> dict[int, bool]:
        """Return whether the copy of each step is complete."""
        self._fs.invalidate_cache()
        try:
            names = [path.rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._root, False)]
        except FileNotFoundError:
            return {}
        steps = sorted(int(name) for name in names if name.isdecimal())
        return {s: self._fs.exists(f"{self._root}/{s}/{checksums.CHECKSUMS_FILE}") for s in steps}

    def wait(self) -> None:
        """Wait until every copy is complete or has failed, and end the thread."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def fetch(self, directory: Path) -> int:
        """Download the newest undamaged copy, if it is newer than the checkpoints of a directory.

        Args:
            directory: directory of the checkpoints. The record of the metrics is placed next to it,
                with the copy.

        Returns:
            The number of downloaded checkpoints: 0 or 1.

        Raises:
            CheckpointError: the object store cannot be read.
        """
        local = [int(path.name) for path in directory.glob("*") if path.name.isdecimal()]
        try:
            complete = [step for step, is_complete in self._list_copies().items() if is_complete]
            for step in sorted(complete, reverse=True):
                if step <= max(local, default=-1):
                    break
                if self._download(step, directory):
                    return 1
        except CheckpointError:
            raise
        except Exception as error:  # each protocol has its own types of errors
            shutil.rmtree(directory.parent / _COPY, ignore_errors=True)
            if disk.is_full(error):
                raise CheckpointError(
                    f"a checkpoint of mirror_address {self.address} cannot be written to "
                    f"{directory}: the disk is full; free space, or set another save_directory"
                ) from error
            raise CheckpointError(
                f"mirror_address {self.address} cannot be read ({type(error).__name__}: {error}): "
                "correct it, or remove it to continue without copies"
            ) from error
        return 0

    def _download(self, step: int, directory: Path) -> bool:
        copy = directory.parent / _COPY
        shutil.rmtree(copy, ignore_errors=True)
        source = f"{self._root}/{step}"
        files = {path.removeprefix(source).strip("/"): path for path in self._fs.find(source)}
        for name in files:
            if ".." in Path(name).parts:
                raise CheckpointError(f"{self.address}/{step} contains the file {name!r}")
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(_PARALLEL) as pool:
            list(pool.map(lambda n: self._fs.get_file(files[n], str(copy / n)), files))
        wrong = checksums.damage(copy)
        if wrong is not None:
            self._say(f"the copy {self.address}/{step} is damaged and is not used: {wrong}")
            shutil.rmtree(copy)
            return False
        directory.mkdir(parents=True, exist_ok=True)
        record = copy / self._record
        if record.exists():
            record.replace(directory.parent / self._record)
        copy.rename(directory / str(step))
        self._say(f"checkpoint {step} was read from {self.address}")
        return True

    def check_unused(self) -> int:
        """Check that the address holds no copies; return 0.

        Raises:
            ConfigError: the address holds copies of an earlier run.
        """
        if steps := [*self._list_copies()]:
            raise ConfigError(
                f"mirror_address {self.address} holds checkpoints of an earlier run (steps "
                f"{', '.join(map(str, steps[:10]))}): name another address for the new run, or "
                "delete them"
            )
        return 0
