"""The lock of a run: one run at a time writes to a `save_directory` and to a mirror.

The main process of a run writes its host, process and start to `run.lock`, and renews the file
while it runs. A lock of the operating system on the file ends with the process, so a run that was
killed can start again on its host at once. A lock of another host, or on an object store, is
abandoned if it is not renewed for `STALE_SECONDS`. The waiting process measures this time with its
monotonic clock, because the clocks of hosts differ and may jump.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import fsspec
from ed_infra.errors import CheckpointError

from ed_trainers.stored import disk

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None

LOCK_FILE = "run.lock"
#: Seconds between two renewals, and seconds without a renewal after which a lock is abandoned.
BEAT_SECONDS, STALE_SECONDS = 5.0, 30.0
#: Seconds in which a process of the same launch, or a child of an ended process, releases the lock.
ENDING_SECONDS = 10.0
#: Bytes of the file. A renewal overwrites them in place, which a full disk does not prevent.
_SIZE = 1024
#: Protocols that create an object only if it does not exist.
_ATOMIC = {"file", "local", "memory", "s3", "s3a", "gs", "gcs"}
#: Protocols without folders, whose `makedirs` would create a missing bucket.
_BUCKETS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"}


@dataclasses.dataclass(frozen=True)
class Owner:
    """The process that holds a lock.

    Attributes:
        token: a text that no other lock has.
        host: name of the host.
        machine: identifies the running system and its numbers of processes.
        pid: number of the process.
        started: time at which the process started, as the system counts it.
        since: date at which the lock was acquired.
        launch: identifies an elastic launch, whose processes follow each other.
    """

    token: str
    host: str
    machine: str
    pid: int
    started: str
    since: str
    launch: str | None = None

    @classmethod
    def current(cls, launch: str | None) -> Owner:
        """Return this process as an owner."""
        pid = os.getpid()
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        host = socket.gethostname()
        return cls(
            uuid.uuid4().hex, host, _machine(host), pid, _get_start_time(pid) or "", now, launch
        )

    @classmethod
    def parse(cls, raw: bytes) -> Owner | None:
        """Return the owner in the content of a lock; None if the content is not readable."""
        try:
            values = json.loads(raw)
            names = {field.name for field in dataclasses.fields(cls)}
            return cls(**{name: value for name, value in values.items() if name in names})
        except (ValueError, TypeError, AttributeError):
            return None

    def content(self, beat: int) -> bytes:
        """Return the content of the lock at its renewal number `beat`."""
        text = json.dumps({**dataclasses.asdict(self), "beat": beat})
        return text.encode().ljust(_SIZE)

    def runs_here(self) -> bool:
        """Whether the process runs on this system."""
        started = _get_start_time(self.pid)
        return self.machine == _machine(socket.gethostname()) and started == self.started != ""

    def has_ended(self) -> bool:
        """Whether the process ran on this system, and does not run any more."""
        return (
            self.machine == _machine(socket.gethostname())
            and _get_start_time(self.pid) != self.started
        )


class LockPlace(Protocol):
    """A place of a lock: a local file, or an object of a store."""

    name: str

    def hold(self) -> bool | None:
        """Acquire the lock of the operating system; False if another process holds it, None if
        there is no such lock."""
        ...

    def read(self) -> bytes | None:
        """Return the content; None without a lock."""
        ...

    def create(self, raw: bytes) -> bool:
        """Write the content of a new lock; False if there is a lock."""
        ...

    def write(self, raw: bytes) -> None:
        """Replace the content."""
        ...

    def drop(self) -> None:
        """Release the lock of the operating system without changing the content."""
        ...

    def remove(self) -> None:
        """Delete the lock, and release it."""
        ...


class LocalPlace:
    """The file `run.lock` of a directory."""

    def __init__(self, directory: Path) -> None:
        self._path = directory.absolute() / LOCK_FILE
        self.name = str(self._path)
        self._descriptor: int | None = None
        if hasattr(os, "register_at_fork"):
            # A child that outlives this process must not keep its lock.
            weak_self = weakref.ref(self)
            os.register_at_fork(after_in_child=lambda: (place := weak_self()) and place.drop())

    def hold(self) -> bool | None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            has_lock = _lock(descriptor)
            # The previous owner may have deleted the file before the lock was acquired.
            if has_lock is False or _is_same_file(descriptor, self._path):
                break
            os.close(descriptor)
        if has_lock is False:
            os.close(descriptor)
        else:
            self._descriptor = descriptor
        return has_lock

    def read(self) -> bytes | None:
        try:
            return self._path.read_bytes() or None
        except FileNotFoundError:
            return None

    def create(self, raw: bytes) -> bool:
        if self.read() is not None:
            return False
        self.write(raw)
        return True

    def write(self, raw: bytes) -> None:
        if self._descriptor is None:
            return
        if not _is_same_file(self._descriptor, self._path):  # somebody deleted the file
            self.drop()
            if self.hold() is False:
                return
        assert self._descriptor is not None
        try:
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            os.write(self._descriptor, raw)
        except OSError as error:
            # The lock of the system is held; the content is information about its owner.
            if not disk.is_full(error):
                raise

    def drop(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()
        self.drop()


class StorePlace:
    """The object `run.lock` in the folder of a mirror.

    Raises:
        ImportError, ValueError: the protocol is not installed or unknown.
    """

    def __init__(self, address: str) -> None:
        self._fs, root = fsspec.core.url_to_fs(address)
        self._root, self._path = root, f"{root.rstrip('/')}/{LOCK_FILE}"
        self.name = f"{address.rstrip('/')}/{LOCK_FILE}"
        protocol = self._fs.protocol
        self._protocols = {protocol} if isinstance(protocol, str) else {*protocol}

    def hold(self) -> bool | None:
        if _BUCKETS.isdisjoint(self._protocols):
            self._fs.makedirs(self._root, exist_ok=True)
        return True if _ATOMIC & self._protocols else None

    def read(self) -> bytes | None:
        self._fs.invalidate_cache()
        try:
            return self._fs.cat_file(self._path) or None
        except FileNotFoundError:
            return None

    def create(self, raw: bytes) -> bool:
        try:
            self._fs.pipe_file(self._path, raw, mode="create")
        except FileExistsError:
            return False
        return True

    def write(self, raw: bytes) -> None:
        self._fs.pipe_file(self._path, raw)

    def drop(self) -> None: ...

    def remove(self) -> None:
        with contextlib.suppress(Exception):  # each protocol has its own types of errors
            self._fs.rm_file(self._path)


class RunLock:
    """The locks of one run; the main process of the run holds them.

    Args:
        directory: the run's `save_directory`.
        mirror: address of the copies of its checkpoints.
        launch: identifies an elastic launch. A lock of the same launch belongs to processes that
            the launcher has ended.
        say: prints a message.
    """

    def __init__(
        self,
        directory: Path,
        mirror: str | None = None,
        *,
        launch: str | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self._directory, self._mirror = directory, mirror
        self._launch, self._say = launch, say
        self._places: list[LockPlace] = []
        self._owner: Owner | None = None
        self._beat = 0
        self._lost: str | None = None
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> int:
        """Acquire the locks, wait for abandoned locks of other hosts, and return 0.

        Raises:
            CheckpointError: another run uses the directory or the mirror.
        """
        self._owner = Owner.current(self._launch)
        try:
            try:
                self._acquire(LocalPlace(self._directory), self._owner)
            except OSError as error:
                raise CheckpointError(
                    f"{self._directory} cannot be written ({error}): set another save_directory"
                ) from error
            if self._mirror is not None:
                self._acquire_store(self._mirror, self._owner)
        except BaseException:
            self.release()
            raise
        self._thread = threading.Thread(target=self._renew, name="run-lock", daemon=True)
        self._thread.start()
        return 0

    def release(self) -> None:
        """Release the locks that this process holds."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()
        places, self._places = self._places, []
        for place in places:
            place.drop() if self._lost else place.remove()

    def check(self) -> None:
        """Check that no other run has taken a lock, for example while this process was suspended.

        Raises:
            CheckpointError: another run has a lock.
        """
        if self._lost is not None:
            raise CheckpointError(self._lost)

    def _acquire_store(self, address: str, owner: Owner) -> None:
        try:
            place = StorePlace(address)
        except (ImportError, ValueError):
            return  # `Mirror` raises the error of an unknown protocol
        try:
            self._acquire(place, owner)
        except CheckpointError:
            raise
        except Exception as error:  # each protocol has its own types of errors
            self._say(
                f"{place.name} cannot be written ({type(error).__name__}: {error}): another run "
                "with this mirror_address would not be noticed"
            )

    def _acquire(self, place: LockPlace, owner: Owner) -> None:
        deadline = time.monotonic() + ENDING_SECONDS
        while (has_lock := place.hold()) is False:
            other_owner = Owner.parse(place.read() or b"")
            # A child of an ended process has the lock until it runs its first instructions.
            is_ending = other_owner is None or other_owner.has_ended() or self._follows(other_owner)
            if not is_ending or time.monotonic() > deadline:
                raise self._busy(place, other_owner)
            time.sleep(0.1)
        try:
            if place.create(owner.content(0)):
                settle = has_lock is None
            else:
                self._await_abandoned(place, has_lock)
                place.write(owner.content(0))
                settle = not isinstance(place, LocalPlace) or has_lock is None
            if settle:  # of two processes that write at the same time, the last one has the lock
                time.sleep(BEAT_SECONDS / 2)
                current_owner = Owner.parse(place.read() or b"")
                if current_owner is None or current_owner.token != owner.token:
                    raise self._busy(place, current_owner)
        except BaseException:
            place.drop()
            raise
        self._places.append(place)

    def _await_abandoned(self, place: LockPlace, has_lock: bool | None) -> None:
        """Return when the owner of a lock has ended, or has not renewed it for a while."""
        raw = place.read()
        other_owner = Owner.parse(raw or b"")
        if raw is None or (other_owner is not None and self._is_over(place, other_owner, has_lock)):
            return
        if other_owner is not None and other_owner.runs_here():
            raise self._busy(place, other_owner)
        name = "a process" if other_owner is None else _describe(other_owner)
        self._say(
            f"{place.name} belongs to {name}: waiting up to {STALE_SECONDS:g} s for a renewal"
        )
        deadline = time.monotonic() + STALE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(min(BEAT_SECONDS / 5, STALE_SECONDS / 5))
            now = place.read()
            if now is None:
                return
            if now != raw:
                raise self._busy(place, Owner.parse(now))

    def _is_over(self, place: LockPlace, other_owner: Owner, has_lock: bool | None) -> bool:
        same = other_owner.machine == _machine(socket.gethostname())
        # The lock of the system is held, so no other process of this system holds it.
        freed = has_lock is True and same and isinstance(place, LocalPlace)
        return freed or self._follows(other_owner) or other_owner.has_ended()

    def _follows(self, other_owner: Owner | None) -> bool:
        """Whether the processes of another owner belong to the same launch, and are over."""
        return (
            other_owner is not None
            and other_owner.launch is not None
            and other_owner.launch == self._launch
        )

    def _busy(self, place: LockPlace, other_owner: Owner | None) -> CheckpointError:
        key = "save_directory" if isinstance(place, LocalPlace) else "mirror_address"
        return CheckpointError(
            f"another run uses the {key}: {place.name} belongs to "
            f"{'another process' if other_owner is None else _describe(other_owner)}; wait for its "
            "end or end "
            f"it, or set another {key}"
        )

    def _renew(self) -> None:
        assert self._owner is not None
        while not self._end.wait(BEAT_SECONDS):
            self._beat += 1
            for place in self._places:
                with contextlib.suppress(Exception):  # a store or disk may fail for a while
                    raw = place.read()
                    other_owner = Owner.parse(raw) if raw is not None else None
                    if other_owner is not None and other_owner.token != self._owner.token:
                        self._lost = str(self._busy(place, other_owner))
                        return
                    place.write(self._owner.content(self._beat))


def _describe(owner: Owner) -> str:
    return f"process {owner.pid} on {owner.host} since {owner.since}"


def _lock(descriptor: int) -> bool | None:
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks
        return None
    return True


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _machine(host: str) -> str:
    """Return a text that identifies a running system, in which numbers of processes are unique."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{host} {uuid.getnode()}"


def _get_start_time(pid: int) -> str | None:
    """Return when a process started; None if the process does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    except OSError:
        return None
    else:
        return None if fields[0] in "ZX" else fields[19]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return ""
